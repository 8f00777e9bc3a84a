"""Race split-learning loops: ``python -m benchmarks.split [--quick] [--json FILE]``.

Contestants take turns on every task, each in fresh processes; the table gives the median of the
turns. A contestant is a function ``run(task, workdir) -> Measurement``, registered in
`CONTESTANTS`. Use ``--task resnet`` for the large model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from benchmarks import bare, footprint, joint, ours, relayed
from benchmarks.contest import Contestant, compete, print_bytes, print_table, write_json
from benchmarks.task import Task

REFERENCE = "bare"
CONTESTANTS: dict[str, Contestant] = {
    "joint": joint.run,
    REFERENCE: bare.run,
    "bare-tuned": bare.run_tuned,
    "ours": ours.run,
    "ours-in-process": ours.run_in_process,
    "relayed": relayed.run,
}
TASK_NAMES = ("small", "large", "resnet")


def make_task(name: str, parties: int, steps: int) -> Task:
    """Return the task of that name: the shapes of ``anchors.md`` and a ResNet-18 a party.

    ``steps`` are measured steps of the small task; a step of the others takes longer, so they get
    fewer.
    """
    label = f"{name}-{parties}"
    if name == "small":
        return Task(label, parties, batch=256, embedding=64, steps=steps)
    if name == "large":
        return Task(label, parties, batch=1024, embedding=1024, steps=max(10, steps // 10))
    return Task(
        label,
        parties,
        batch=64,
        embedding=64,
        steps=max(3, steps // 100),
        warmup=1,
        rows=640,
        bottom="resnet18",
    )


def make_tasks(names: Sequence[str], parties: Sequence[int], steps: int) -> list[Task]:
    """Return every shape with every number of passive parties; the ResNet task always has two."""
    shapes = [(name, count) for name in names for count in (parties if name != "resnet" else (2,))]
    return [make_task(name, count, steps) for name, count in shapes]


def _parse_parties(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    try:
        counts = [int(count) for count in value.split(",")]
    except ValueError as error:
        raise click.BadParameter("give numbers of passive parties, like 1,2,4") from error
    if min(counts) < 1:
        raise click.BadParameter("a run needs at least one passive party")
    return counts


@click.command(help=__doc__)
@click.option(
    "--task", "names", type=click.Choice(TASK_NAMES), multiple=True, default=("small", "large")
)
@click.option(
    "--parties",
    callback=_parse_parties,
    default="1,2,4",
    show_default=True,
    help="Numbers of passives.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=20),
    default=600,
    show_default=True,
    help="Measured steps, small task.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Turns of each contestant.",
)
@click.option(
    "--contestant",
    "chosen",
    type=click.Choice(sorted(CONTESTANTS)),
    multiple=True,
    help="All by default.",
)
@click.option(
    "--in-flight",
    "depths",
    type=click.IntRange(min=2),
    multiple=True,
    help="Also ours with this many (D) steps in flight, as ours-D.",
)
@click.option(
    "--micro-batches",
    "parts",
    type=click.IntRange(min=2),
    multiple=True,
    help="Also ours with batches that cross in this many (M) parts, as ours-in-M.",
)
@click.option("--quick", is_flag=True, help="Two parties, 100 steps, one turn: does it still run?")
@click.option(
    "--footprint/--no-footprint",
    "with_footprint",
    default=True,
    help="Also import cost and memory.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write every turn here.",
)
def main(
    names: tuple[str, ...],
    parties: list[int],
    steps: int,
    repeats: int,
    chosen: tuple[str, ...],
    depths: tuple[int, ...],
    parts: tuple[int, ...],
    quick: bool,
    with_footprint: bool,
    json_path: Path | None,
) -> None:
    """Run the race and print one table."""
    if quick:
        parties, steps, repeats = [2], 100, 1
    contestants = {name: run for name, run in CONTESTANTS.items() if not chosen or name in chosen}
    contestants |= {
        f"ours-{depth}": partial(ours.run, settings={"in_flight": depth}) for depth in depths
    }
    contestants |= {
        f"ours-in-{count}": partial(ours.run, settings={"micro_batches": count}) for count in parts
    }
    progress, console = Console(stderr=True), Console(width=None if Console().is_terminal else 120)
    with tempfile.TemporaryDirectory(prefix="vfl-split-") as workdir:
        scores = compete(
            contestants, make_tasks(names, parties, steps), repeats, Path(workdir), progress.print
        )
        costs = (
            footprint.measure(_made(Path(workdir) / "footprint"), repeats) if with_footprint else {}
        )
    print_table(scores, REFERENCE, console)
    print_bytes(scores, console)
    for name, value in costs.items():
        console.print(
            f"{name:>20}  {value:.2f}" if isinstance(value, float) else f"{name:>20}  {value}"
        )
    if json_path:
        write_json(scores, costs, json_path)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
