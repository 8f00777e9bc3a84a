"""Measure encoding and decoding an embedding beside a plain copy of it: ``python -m
benchmarks.wire``.

The three take turns in one process, in processor time of the thread that does them. The lower
quartile counts, because what else the machine does can only add to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import click
import numpy as np

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.frames import Assembly, encode, parse_frame

STEP = StepKey("train", 0, 1)
# float32; the first and the last are those of `benchmarks.split`.
SHAPES = ((256, 64), (1024, 256), (1024, 1024))


def decode(frames: Sequence[bytes], expect: BundleSpec) -> Bundle:
    """Return the bundle, as a link or a hub takes it in."""
    received = [parse_frame(data, party="peer") for data in frames]
    assembly = Assembly(received[0], expect, party="peer")
    for frame in received:
        bundle = assembly.feed(frame)
    if bundle is None:
        raise RuntimeError("the frames that were encoded are not a whole bundle")
    return bundle


def quartiles_us(contestants: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return each contestant's lower quartile in microseconds; they take turns."""
    times_ns: dict[str, list[int]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, run in contestants.items():
            began_ns = time.thread_time_ns()
            made = run()
            times_ns[name].append(time.thread_time_ns() - began_ns)
            # Its memory is free for the next one, as in a step.
            del made
    return {name: statistics.quantiles(each, n=4)[0] / 1e3 for name, each in times_ns.items()}


def measure(rows: int, columns: int, turns: int) -> dict[str, float]:
    """Return the microseconds of a copy, of encoding and of decoding a tensor of that shape."""
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    view = memoryview(values).cast("B")
    bundle = Bundle(Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, (rows, columns), view)})
    expect = BundleSpec(Kind.EMBEDDING, {"z": TensorSpec(DType.FLOAT32, (rows, columns))})
    frames = [frame.data for frame in encode(STEP, bundle)]
    contestants: dict[str, Callable[[], object]] = {
        "copy": lambda: bytes(view),
        "encode": lambda: encode(STEP, bundle),
        "decode": lambda: decode(frames, expect),
    }
    quartiles_us(contestants, 10)
    return quartiles_us(contestants, turns)


@click.command(help=__doc__)
@click.option("--turns", default=1000, show_default=True, help="Of each, for every shape.")
def main(turns: int) -> None:
    """Print a line for each shape: microseconds, and their ratio to the copy's."""
    for rows, columns in SHAPES:
        found = measure(rows, columns, turns)
        ratios = ", ".join(
            f"{name} {found[name]:.1f} µs ({found[name] / found['copy']:.2f})" for name in found
        )
        click.echo(f"{rows} x {columns} float32, {rows * columns / (1 << 18):g} MiB: {ratios}")


if __name__ == "__main__":
    main()
