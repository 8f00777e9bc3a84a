"""Latency and throughput of a served model beside two FastAPI processes written by hand:
``python -m benchmarks.serve [--seconds 10] [--repeats 3] [--json FILE]``.

Two parties, one id a request or 256. *Poisson* requests come whether the ones before are answered
or not, so waiting counts; the others come over 16 connections, each after its answer. Both
contestants take turns. The load generator shares the cores with the programs.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
import pandas as pd

import vfl
from benchmarks.serve_by_hand import post

ROWS = 2_000
_CONNECTIONS = 16
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]
IDS = [f"K-{number}" for number in range(ROWS)]


def trained(folder: Path) -> vfl.Run:
    """Trains two parties of ten columns; writes their files. Returns the run."""
    noise = np.random.default_rng(0)
    x = noise.normal(size=(ROWS, 20)).round(4)
    label = (x[:, :10].sum(1) * x[:, 10:].sum(1) > 0).astype(int)
    data = {}
    for at, name in enumerate(("p0", "p1")):
        frame = pd.DataFrame(x[:, 10 * at : 10 * at + 10], columns=[f"c{j}" for j in range(10)])
        frame = frame.add_prefix(f"{name}_")
        frame.insert(0, "id", IDS)
        if name == "p0":
            frame["label"] = label
        frame.to_csv(folder / f"{name}.csv", index=False)
        data[name] = vfl.Data(
            str(folder / f"{name}.csv"), id="id", label="label" if name == "p0" else None
        )
    recipe: dict[str, Any] = {
        "name": "served",
        "seed": 1,
        "task": {"kind": "binary"},
        "parties": [{"name": "p0", "role": "active"}, {"name": "p1", "role": "passive"}],
        "model": {"embedding_size": 32, "encoder": {"kind": "mlp", "hidden": [128]}},
        "phases": [{"kind": "splitnn", "epochs": 2, "batch_size": 128}],
    }
    vfl.Recipe.from_dict(recipe).save(folder / "recipe.toml")
    return vfl.simulate(recipe, data=data, out=folder / "f" / "runs", quiet=True)


def ours(folder: Path, run: vfl.Run, stack: ExitStack) -> str:
    """Starts both parties' programs; returns the URL."""
    certs, listen = folder / "certs", f"127.0.0.1:{random.SystemRandom().randint(10_000, 32_000)}"
    vfl_ = [sys.executable, "-m", "vfl"]
    for making in (
        ["ca", "--out", str(certs)],
        ["issue", "p0", "p1", "server", "--ca", str(certs)],
    ):
        subprocess.run([*vfl_, "certs", *making], check=True, capture_output=True)
    url = ""
    for name in ("p0", "p1"):
        label = ', label = "label"' if name == "p0" else ""
        role = f'listen = "{listen}"' if name == "p0" else f'active = "{listen}"'
        (folder / f"{name}.toml").write_text(
            f'name = "{name}"\nrecipe = "recipe.toml"\nserver = "127.0.0.1:1"\n{role}\n'
            f'out = "f/runs"\n'
            f'tls = {{ ca = "certs/ca.pem", certificate = "certs/{name}.pem", '
            f'key = "certs/{name}.key" }}\n'
            f'data = {{ source = "{name}.csv", id = "id"'
            f"{label}"
            " }\n"
            'serve = { http = "127.0.0.1:0" }\n'
        )
        words = ["vfl_party", "serve", f"{name}.toml", "--run", run.folder.name]
        program = started([sys.executable, "-m", *words], folder, stack)
        wanted = "ready" if name == "p0" else "attending"
        while (event := json.loads(program.stdout.readline()))["event"] != wanted:  # type: ignore[union-attr]
            pass
        url = event.get("http", url)
    return url


def by_hand(folder: Path, stack: ExitStack) -> str:
    """Starts the two programs that were written by hand; returns the URL."""
    module, url = [sys.executable, "-m", "benchmarks.serve_by_hand"], ""
    for words in (["p1", str(folder)], ["p0", str(folder)]):
        program = started([*module, *words, *([url] if url else [])], Path.cwd(), stack)
        url = json.loads(program.stdout.readline())["url"]  # type: ignore[union-attr]
    return url


def started(words: list[str], cwd: Path, stack: ExitStack) -> subprocess.Popen[str]:
    """Starts a program, which ends with ``stack``."""
    program = subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        program.terminate()
        program.wait(20)

    stack.callback(end)
    return program


async def connected(url: str, count: int) -> list[Line]:
    """Opens connections."""
    host, port = urlsplit(url).netloc.split(":")
    return [await asyncio.open_connection(host, int(port)) for _ in range(count)]


async def closed(url: str, rows: int, seconds: float) -> float:
    """Returns requests a second over some connections, each after its last answer."""
    until, done = time.perf_counter() + seconds, 0

    async def one(line: Line, seed: int) -> None:
        nonlocal done
        choose = random.Random(seed)  # noqa: S311 - a benchmark's choice of ids
        while time.perf_counter() < until:
            answer = await post(line, "/v1/predict", {"ids": choose.choices(IDS, k=rows)})
            assert len(answer["rows"]) == rows
            done += 1

    lines = await connected(url, _CONNECTIONS)
    began = time.perf_counter()
    await asyncio.gather(*(one(line, at) for at, line in enumerate(lines)))
    return done / (time.perf_counter() - began)


async def poisson(url: str, rate: float, seconds: float) -> list[float]:
    """Returns milliseconds from when each request should have been sent to its answer."""
    choose = random.Random(1)  # noqa: S311 - a benchmark's arrivals
    free: asyncio.Queue[Line] = asyncio.Queue()
    for line in await connected(url, 64):
        free.put_nowait(line)
    took: list[float] = []

    async def one(due: float) -> None:
        line = await free.get()
        await post(line, "/v1/predict", {"ids": [choose.choice(IDS)]})
        took.append(1000 * (time.perf_counter() - due))
        free.put_nowait(line)

    due, tasks = time.perf_counter(), []
    end = due + seconds
    while due < end:
        due += choose.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return took


def measured(url: str, seconds: float) -> dict[str, float]:
    """Measures one contestant once."""

    def run(work: Callable[[], Awaitable[Any]]) -> Any:
        return asyncio.run(work())  # type: ignore[arg-type]

    run(lambda: closed(url, 1, 1.0))
    took = run(lambda: poisson(url, 100.0, seconds))
    return {
        "p50_ms": float(np.percentile(took, 50)),
        "p99_ms": float(np.percentile(took, 99)),
        "ids_s": run(lambda: closed(url, 1, seconds)),
        "rows_s": 256 * run(lambda: closed(url, 256, seconds)),
    }


@click.command(help=__doc__)
@click.option("--seconds", default=10.0, show_default=True, help="Of each measurement.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all turns.")
def main(seconds: float, repeats: int, path: Path | None) -> None:
    turns: dict[str, list[dict[str, float]]] = {"ours": [], "by hand": []}
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder = Path(home)
        run = trained(folder)
        urls = {"ours": ours(folder, run, stack), "by hand": by_hand(folder, stack)}
        for _turn in range(repeats):
            for name, url in urls.items():
                turns[name].append(measured(url, seconds))
    for name, found in turns.items():
        middle = {key: median(each[key] for each in found) for key in found[0]}
        said = "  ".join(f"{key} {value:,.1f}" for key, value in middle.items())
        click.echo(f"{name:8} {said}")
    if path is not None:
        path.write_text(json.dumps(turns, indent=1) + "\n")


if __name__ == "__main__":
    main()
