"""Rank ways to run the bare loop: ``python -m benchmarks.bare_variants --task small --turns 3``.

The first variant is the reference, each other changes one thing. Look at the ``quiet`` column on a
busy machine.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks import bare
from benchmarks.bare_wire import Wire
from benchmarks.contest import Contestant, compete, print_table, write_json
from benchmarks.task import Task

MIB = 1 << 20
TASKS = {
    "small": Task("small", parties=2, batch=256, embedding=64, steps=400),
    "large": Task("large", parties=2, batch=1024, embedding=1024, steps=50),
}
_AIO = Wire(active="aio", passive="aio")

# glibc gives megabytes back to the kernel at each free, and every step faults them in again, page
# by page.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1024 * MIB)}


def _options(base: Wire, **values: int | str) -> Wire:
    """Return ``base`` with gRPC options; ``__`` in a name stands for a dot and the prefix ``grpc.``
    is implied.
    """
    return replace(
        base,
        options=tuple((f"grpc.{name.replace('__', '.')}", value) for name, value in values.items()),
    )


def _experiments(base: Wire, names: str) -> Wire:
    return replace(base, environment={"GRPC_EXPERIMENTS": names})


def variants(base: Wire) -> dict[str, Wire]:
    """Return named wires, each one change from ``base``."""
    # Fmt: skip.
    return {
        "base": base,
        "queue/sync": replace(base, active="queue", passive="sync"),
        "inline/sync": replace(base, active="inline", passive="sync"),
        "queue/aio": replace(base, active="queue", passive="aio"),
        "aio/sync": replace(base, active="aio", passive="sync"),
        "aio/aio": replace(base, active="aio", passive="aio"),
        "queue/unary": replace(base, active="queue", passive="unary"),
        "update-first": replace(base, reply_first=False),
        "plaintext": replace(base, tls=False),
        "frames-1MiB": replace(base, frame_bytes=MIB),
        "frames-256KiB": replace(base, frame_bytes=MIB // 4),
        "http2-frame-16MiB": _options(base, http2__max_frame_size=16 * MIB - 1),
        "write-buffer-8MiB": _options(base, http2__write_buffer_size=8 * MIB),
        "bdp-off": _options(base, http2__bdp_probe=0),
        "lookahead-16MiB": _options(base, http2__lookahead_bytes=16 * MIB),
        "bdp-off+lookahead": _options(base, http2__bdp_probe=0, http2__lookahead_bytes=16 * MIB),
        "http2-all": _options(
            base,
            http2__bdp_probe=0,
            http2__lookahead_bytes=16 * MIB,
            http2__max_frame_size=16 * MIB - 1,
            http2__write_buffer_size=8 * MIB,
        ),
        "read-chunk-1MiB": _options(
            base,
            experimental__tcp_read_chunk_size=MIB,
            experimental__tcp_min_read_chunk_size=MIB,
            experimental__tcp_max_read_chunk_size=8 * MIB,
        ),
        "target-latency": _options(base, optimization_target="latency"),
        "target-throughput": _options(base, optimization_target="throughput"),
        "poll": replace(base, environment={"GRPC_POLL_STRATEGY": "poll"}),
        "no-event-engine": _experiments(base, "-event_engine_client,-event_engine_listener"),
        "malloc-keep": replace(base, environment=_KEEP_MEMORY),
        "malloc-keep+1-arena": replace(base, environment={**_KEEP_MEMORY, "MALLOC_ARENA_MAX": "1"}),
        "malloc-keep+frames-1MiB": replace(base, environment=_KEEP_MEMORY, frame_bytes=MIB),
        "no-event-engine+update-first": replace(
            _experiments(base, "-event_engine_client,-event_engine_listener"), reply_first=False
        ),
        "tcp-frame-tuning": _experiments(base, "tcp_frame_size_tuning,tcp_rcv_lowat"),
        "peer-framing": _experiments(base, "peer_state_based_framing"),
    }


@click.command(help=__doc__)
@click.option(
    "--task",
    "task_names",
    type=click.Choice(sorted(TASKS)),
    multiple=True,
    default=("small", "large"),
)
@click.option("--turns", default=3, show_default=True)
@click.option("--only", multiple=True, help="Variants to run; all by default.")
@click.option(
    "--active", type=click.Choice(["queue", "inline", "aio"]), default="aio", show_default=True
)
@click.option(
    "--passive", type=click.Choice(["sync", "aio", "unary"]), default="aio", show_default=True
)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
def main(
    task_names: tuple[str, ...],
    turns: int,
    only: tuple[str, ...],
    active: str,
    passive: str,
    json_path: Path | None,
) -> None:
    """Run the variants in turns and print one table."""
    wires = variants(replace(_AIO, active=active, passive=passive))  # type: ignore[arg-type]
    chosen: dict[str, Contestant] = {
        name: functools.partial(bare.run, wire=wire)
        for name, wire in wires.items()
        if not only or name in only
    }
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as workdir:
        tasks = [TASKS[name] for name in task_names]
        scores = compete(chosen, tasks, turns, Path(workdir), lambda line: console.log(line))
    for score in scores:
        cpu_ms = statistics.median(turn.extra["cpu_s_per_step"] for turn in score.turns) * 1000
        console.print(
            f"{score.task.name} {score.contestant}: {cpu_ms:.2f} ms CPU a step in the "
            "active process"
        )
    print_table(scores, next(iter(chosen)), console)
    if json_path:
        write_json(scores, json_path)


if __name__ == "__main__":
    main()
