"""Steps a second of ResNet-18 on 3 x 32 x 32, two passive parties and an active one on one device:
``python -m benchmarks.gpu.speed``.

One process (``joint``), the bare loop and the real system, as in ``benchmarks.split``. The bare
loop copies from and to ordinary memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks import bare, joint, ours
from benchmarks.contest import Contestant
from benchmarks.gpu.tell import device_option, tell, tiny_option
from benchmarks.task import Task

Precision = Literal["float32", "bfloat16"]
SIZES = ((256, 64), (256, 1024), (1024, 64), (1024, 1024))
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
ROWS, FEW = 20_480, 10_240


def task(
    batch: int, embedding: int, device: str, precision: Precision, rows: int, tiny: bool
) -> Task:
    return Task(
        f"resnet-{batch}-{embedding}-{precision}",
        parties=2,
        batch=16 if tiny else batch,
        embedding=embedding,
        steps=2 if tiny else rows // batch,
        warmup=1 if tiny else 5,
        rows=32 if tiny else rows,
        bottom="resnet18",
        device=device,
        precision=precision,
    )


CONTESTANTS: dict[str, Contestant] = {
    "joint": joint.run,
    "ours": ours.run,
    "bare": bare.run,
    "ours-2": partial(ours.run, settings={"in_flight": 2}),
}


def times_of(workdir: Path) -> list[dict[str, Any]]:
    """Return what the parties' summary says of their time and memory; nothing of other
    contestants.
    """
    found = []
    for path in workdir.glob("runs/*/summary.json"):
        for party in json.loads(path.read_bytes())["parties"]:
            kept = ("name", "device", "device_name", "peak_memory_bytes", "times")
            found.append({key: party.get(key) for key in kept})
    return found


@click.command()
@device_option
@tiny_option
@click.option("--few", is_flag=True, help="Three shapes and two contestants, with fewer steps.")
def main(device: str, tiny: bool, few: bool) -> None:
    """Let all run, one after the other."""
    shapes = [(precision, *size) for precision in PRECISIONS for size in SIZES]
    names = [*CONTESTANTS]
    if few or tiny:
        shapes = [("bfloat16", 256, 1024), ("float32", 1024, 1024), ("bfloat16", 1024, 1024)]
        names = names[:2]
    for precision, batch, embedding in shapes[1:2] if tiny else shapes:
        of = task(batch, embedding, device, precision, FEW if few else ROWS, tiny)
        for name in names:
            # It has no autocast.
            if name != "bare" or precision == "float32":
                measure(name, CONTESTANTS[name], of)


def measure(name: str, run: Callable[[Task, Path], Any], of: Task) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(of, Path(folder))
        except Exception as error:  # noqa: BLE001 - the others are measured still
            tell("failed", contestant=name, task=of.name, why=str(error)[-1500:])
            return
        tell(
            "speed",
            contestant=name,
            task=of.name,
            batch=of.batch,
            embedding=of.embedding,
            precision=of.precision,
            steps_per_s=found.steps_per_s,
            extra=dict(found.extra),
            parties=times_of(Path(folder)),
        )


if __name__ == "__main__":
    main()
