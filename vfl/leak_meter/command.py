"""``vfl leaks``: the command that the entry point ``vfl.commands`` adds to the program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vfl_common.process.program import EXIT_CODES

if TYPE_CHECKING:
    from vfl.leak_meter.report.result import Rehearsed


@click.command(epilog=EXIT_CODES)
@click.argument(
    "recipes",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option("--attacks", metavar="A,B,…", help="Which attacks to play; all, if it is left out.")
@click.option(
    "--seeds",
    metavar="1,2,…",
    help="Seeds of the recipe, one run each; its own, if it is left out.",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Record each n-th round only.",
)
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at a time."
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Let a backend of joblib make the runs and play the attacks, as for vfl study.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the table.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the picture, the JSON and the runs.",
)
def leaks(
    recipes: tuple[Path, ...],
    attacks: str | None,
    seeds: str | None,
    every: int,
    jobs: int,
    backend: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Rehearse attacks: what could each party of RECIPE read from the messages that it receives?

    All parties run in this process, what arrives at each is recorded, and each attack is played on
    it. So all parties' data must be in this one place: take data that may be, or data that stand in
    for the real ones. Beside each leak stands what the same attack finds without the information,
    and the metric and bytes of the run. Several recipes, such as one for each defence, are
    compared. The party files of all parties are one recipe together, as for vfl simulate.

    \b
    Examples:
      vfl leaks examples/breast-cancer.toml
      vfl leaks bank.toml ../shop/shop.toml
      vfl leaks plain.toml marvell.toml --seeds 1,2,3 --attacks norm,cosine --out leaks
    """
    # Late, because this imports torch.
    from vfl.leak_meter.api import leaks as rehearse
    from vfl.leak_meter.report.show import read_list, show_leaks

    results: list[Rehearsed] = []
    try:
        rehearse(
            recipes,
            attacks=read_list(attacks, "--attacks", str),
            seeds=read_list(seeds, "--seeds", int),
            every=every,
            out=out,
            quiet=as_json,
            tell=results.append,
            jobs=jobs,
            backend=backend,
        )
    finally:
        # What was found before a run that failed took its time.
        if results:
            show_leaks(results, as_json=as_json, out=out)
