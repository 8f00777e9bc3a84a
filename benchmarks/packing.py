"""Times how long it takes to write numbers in few bits and to read them again, on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.packing [--rows 1024] [--width 1024] [--repeats 200]
    [--json FILE]

Every codec in turn, and a copy of the same memory beside it, in each of the repeats; medians, wall
time beside the time of the core. The numbers are normal. Codecs of float16 and bfloat16 are
torch's, as in a run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from vfl_common.bundle import Kind, StepKey
from vfl_common.packing.coders import get_rows_and_width
from vfl_party.outbound import codecs
from vfl_party.outbound.declared import Sent, f32
from vfl_party.outbound.filter import Filter, Passage

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
    "8 bits, stochastic": ("bits", {"bits": 8}),
    "8 bits, nearest": ("bits", {"bits": 8, "rounding": "nearest"}),
    "4 bits, stochastic": ("bits", {"bits": 4}),
    "4 bits, nearest": ("bits", {"bits": 4, "rounding": "nearest"}),
    "2 bits, stochastic": ("bits", {"bits": 2}),
    "2 bits, nearest": ("bits", {"bits": 2, "rounding": "nearest"}),
    "top 10 %": ("topk", {"keep": 0.1}),
    "random top 10 %": ("randtopk", {"keep": 0.1}),
}
COPY = "a copy"


class Clock:
    """Milliseconds of wall and core, of every call by name."""

    def __init__(self) -> None:
        self.wall_ms: dict[str, list[float]] = {}
        self.core_ms: dict[str, list[float]] = {}

    def time(self, name: str, act: Callable[[], Any]) -> Any:
        wall, core = time.perf_counter(), time.process_time()
        found = act()
        self.core_ms.setdefault(name, []).append(1e3 * (time.process_time() - core))
        self.wall_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - wall))
        return found

    def median(self, name: str) -> tuple[float, float]:
        return statistics.median(self.wall_ms[name]), statistics.median(self.core_ms[name])


def measure(rows: int, width: int, repeats: int) -> list[dict[str, Any]]:
    """Returns a line for each codec: milliseconds, bytes a number, and the worst and the usual
    error.
    """
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))
    spec = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}).spec(rows=rows, width=width)
    made: dict[str, Filter] = {
        name: codecs.make(kind, "here", of) for name, (kind, of) in CODECS.items()
    }
    clock, errors = Clock(), dict[str, torch.Tensor]()
    target = torch.empty_like(x)
    for repeat in range(-3, repeats):
        # Without the first rounds.
        clock = clock if repeat else Clock()
        clock.time(COPY, lambda: target.copy_(x))
        for name, codec in made.items():
            at = Passage(StepKey("phase", 0, repeat), "p1", "p0")
            sent = clock.time(
                f"encode {name}", lambda codec=codec, at=at: codec.apply_at(at, {"z": x})
            )
            back = clock.time(
                f"decode {name}",
                lambda codec=codec, at=at, sent=sent: codec.undo_at(at, sent, spec),
            )
            errors[name] = (back["z"] - x).abs()
    lines = [_line(COPY, clock.median(COPY), (0.0, 0.0), 4.0, torch.zeros(1))]
    for name, codec in made.items():
        bytes_ = codec.wire_spec(spec).payload_bytes / max(
            1, get_rows_and_width(x.shape)[0] * width
        )
        encode, decode = clock.median(f"encode {name}"), clock.median(f"decode {name}")
        lines.append(_line(name, encode, decode, bytes_, errors[name]))
    return lines


def _line(
    name: str,
    encode: tuple[float, float],
    decode: tuple[float, float],
    bytes_: float,
    error: torch.Tensor,
) -> dict[str, Any]:
    return {
        "codec": name,
        "encode_ms": encode[0],
        "decode_ms": decode[0],
        "both_ms": encode[0] + decode[0],
        "both_core_ms": encode[1] + decode[1],
        "bytes_a_number": bytes_,
        "worst_error": error.max().item(),
        "usual_error": error.pow(2).mean().sqrt().item(),
    }


@click.command()
@click.option("--rows", default=1024)
@click.option("--width", default=1024)
@click.option("--repeats", default=200)
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(rows: int, width: int, repeats: int, out: Path | None) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    lines = measure(rows, width, repeats)
    table = Table(title=f"{rows:,} × {width:,} normal numbers, {repeats} repeats, medians")
    for heading in (
        "codec",
        "encode ms",
        "decode ms",
        "both ms",
        "both, core ms",
        "bytes a number",
        "worst error",
        "rms",
    ):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for line in lines:
        name, *numbers = line.values()
        table.add_row(name, *(f"{number:.3g}" for number in numbers))
    Console(width=120).print(table)
    if out is not None:
        out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
