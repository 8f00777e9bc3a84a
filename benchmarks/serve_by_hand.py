"""What somebody would write by hand in an afternoon: two FastAPI processes, one asks the other for
embeddings over HTTP. ``python -m benchmarks.serve_by_hand bank|shop FOLDER [SHOP'S URL]``

It does the same forward pass from the same run, and nothing else: no TLS between the parties, no
limits, no parties that are away, one request at a time to the model.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

import vfl


class Ids(BaseModel):
    """A request."""

    ids: list[str]


def _rows(run: vfl.Run, party: str, source: Path) -> tuple[dict[str, int], Any]:
    """Returns {id: row}, and the embeddings' inputs of all rows."""
    import pandas

    frame = pandas.read_csv(source)
    model = run.model(party)
    places = {each: at for at, each in enumerate(frame["id"].astype(str))}
    columns = frame.drop(columns=[name for name in ("id", "label") if name in frame])
    return places, (model, model.prepare(columns))


def app_of(party: str, folder: Path, shop: str) -> FastAPI:
    """Makes one of the two programs."""
    run = vfl.Run.load(next((folder / "f" / "runs").glob("*/summary.json")).parent)
    places, (model, inputs) = _rows(run, party, folder / f"{party}.csv")
    encoder = model.encoder
    app = FastAPI()

    @torch.no_grad()
    def embed(ids: list[str]) -> torch.Tensor:
        rows = torch.tensor([places[each] for each in ids])
        found: torch.Tensor = encoder(*(each[rows] for each in inputs))
        return found

    if party != "p0":

        @app.post("/embed", response_model=None)
        async def answer(asked: Ids) -> dict[str, Any]:
            return {"z": embed(asked.ids).tolist()}

        return app
    host, _, port = shop.removeprefix("http://").partition(":")
    lines: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def ask(ids: list[str]) -> list[list[float]]:
        line = (
            lines.get_nowait()
            if not lines.empty()
            else await asyncio.open_connection(host, int(port))
        )
        found: list[list[float]] = (await post(line, "/embed", {"ids": ids}))["z"]
        lines.put_nowait(line)
        return found

    @app.post("/v1/predict", response_model=None)
    async def predict(asked: Ids) -> dict[str, Any]:
        other = asyncio.create_task(ask(asked.ids))
        own = embed(asked.ids)
        with torch.no_grad():
            z = torch.cat([own, torch.tensor(await other)], dim=1)
            scores_NC = model.top(z).softmax(dim=1)
        chosen = scores_NC.argmax(dim=1).tolist()
        return {
            "rows": [
                {
                    "id": each,
                    **{f"score_{c}": score for c, score in enumerate(scores)},
                    "class": best,
                }
                for each, scores, best in zip(asked.ids, scores_NC.tolist(), chosen, strict=True)
            ]
        }

    return app


async def post(
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, body: Any
) -> Any:
    """Sends one request over a connection that stays open; returns the answer."""
    reader, writer = line
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    headers = await reader.readuntil(b"\r\n\r\n")
    if not headers.startswith(b"HTTP/1.1 200"):
        raise OSError(headers.split(b"\r\n")[0].decode())
    lower = headers.lower()
    at = lower.index(b"content-length:") + len(b"content-length:")
    length = int(lower[at : lower.index(b"\r\n", at)])
    return json.loads(await reader.readexactly(length))


def main() -> None:
    party, folder, *shop = sys.argv[1:]
    torch.set_num_threads(1)
    # As those that uvicorn opens itself: asyncio turns off the wait for more to send.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(1000)
    config = uvicorn.Config(
        app_of(party, Path(folder), shop[0] if shop else ""),
        log_level="error",
        access_log=False,
        # Its own connection to the other process may be idle while it is not measured.
        timeout_keep_alive=600,
    )
    print(json.dumps({"url": f"http://127.0.0.1:{bound.getsockname()[1]}"}), flush=True)
    uvicorn.Server(config).run([bound])


if __name__ == "__main__":
    main()
