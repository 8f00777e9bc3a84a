"""The baseline of ``benchmarks.serve``: a FastAPI process and a grpc.aio process with mutual TLS, as an
engineer would write them in an afternoon. ``python -m benchmarks.serve_by_hand p0|p1 FOLDER [ADDRESS OF P1]``

They compute the same forward pass from the same run. Ids cross as JSON, embeddings as raw float32. They
have no batching, no record, no access log, no limits, and answer 503 if p1 is away.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import vfl

METHOD = "/by.Hand/Embed"
DEADLINE_S = 0.5
Embed = Callable[[list[str]], torch.Tensor]


class Ids(BaseModel):
    """A request."""

    ids: list[str]


def load(party: str, folder: Path) -> tuple[vfl.Model, Embed]:
    """Returns a party's model, and a function from ids to embeddings of shape (ids, width)."""
    import pandas

    run = vfl.Run.load(next((folder / "f" / "runs").glob("*/summary.json")).parent)
    frame = pandas.read_csv(folder / f"{party}.csv")
    model = run.model(party)
    rows = {id_: row for row, id_ in enumerate(frame["id"].astype(str))}
    inputs = model.prepare(frame.drop(columns=[c for c in ("id", "label") if c in frame]))

    @torch.no_grad()
    def embed(ids: list[str]) -> torch.Tensor:
        places = torch.tensor([rows[id_] for id_ in ids])
        embeddings: torch.Tensor = model.encoder(*(column[places] for column in inputs))
        return embeddings

    return model, embed


def read_certificates(party: str, folder: Path) -> tuple[bytes, bytes, bytes]:
    """Returns the authority's certificate, the party's key and the party's certificate."""
    certs = folder / "certs"
    names = ("ca.pem", f"{party}.key", f"{party}.pem")
    ca, key, certificate = ((certs / name).read_bytes() for name in names)
    return ca, key, certificate


async def serve_embeddings(party: str, folder: Path) -> None:
    """Serves the passive party until the process is terminated."""
    _, embed = load(party, folder)
    ca, key, certificate = read_certificates(party, folder)

    async def answer(request: bytes, _context: Any) -> bytes:
        return embed(json.loads(request)).numpy().tobytes()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(json.dumps({"url": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


def app_of(party: str, folder: Path, address: str) -> FastAPI:
    """Makes the active party's application."""
    model, embed = load(party, folder)
    ca, key, certificate = read_certificates(party, folder)
    app = FastAPI()
    calls: list[Any] = []

    def call() -> Any:
        # A channel belongs to the loop in which it is made.
        if not calls:
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            name = [("grpc.ssl_target_name_override", "p1")]
            calls.append(grpc.aio.secure_channel(address, credentials, name).unary_unary(METHOD))
        return calls[0]

    @app.post("/v1/predict", response_model=None)
    async def predict(request: Ids) -> dict[str, Any]:
        answer = asyncio.ensure_future(call()(json.dumps(request.ids).encode(), timeout=DEADLINE_S))
        own_BD = embed(request.ids)
        try:
            values = np.frombuffer(await answer, np.float32).reshape(len(request.ids), -1)
        except grpc.aio.AioRpcError as error:
            raise HTTPException(503) from error
        with torch.no_grad():
            z_BD = torch.cat([own_BD, torch.from_numpy(values.copy())], dim=1)
            scores_BC = model.top(z_BD).softmax(dim=1)
        classes = scores_BC.argmax(dim=1).tolist()
        rows = zip(request.ids, scores_BC.tolist(), classes, strict=True)
        return {
            "rows": [
                {"id": id_, **{f"score_{c}": s for c, s in enumerate(scores)}, "class": best}
                for id_, scores, best in rows
            ]
        }

    return app


def main() -> None:
    """Runs one of the two programs, and prints where it listens."""
    party, folder, *address = sys.argv[1:]
    torch.set_num_threads(1)
    if not address:
        asyncio.run(serve_embeddings(party, Path(folder)))
        return
    # TCP_NODELAY is set on sockets whose protocol is named: asyncio would else delay answers.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(1000)
    app = app_of(party, Path(folder), address[0])
    config = uvicorn.Config(app, log_level="error", access_log=False)
    print(json.dumps({"url": f"http://127.0.0.1:{bound.getsockname()[1]}"}), flush=True)
    uvicorn.Server(config).run([bound])


if __name__ == "__main__":
    main()
