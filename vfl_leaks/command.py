"""``vfl leaks``: the command that the entry point ``vfl.commands`` adds to the program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vfl_common.process.program import EXIT_CODES

if TYPE_CHECKING:
    from vfl_leaks.result import Rehearsed


@click.command(epilog=EXIT_CODES)
@click.argument(
    "recipes",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option("--attacks", metavar="A,B,…", help="Play only these attacks. [default: all]")
@click.option(
    "--seeds",
    metavar="1,2,…",
    help="Make one run for each seed. [default: the recipe's seed]",
)
@click.option(
    "--every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Record only each n-th round.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Make this many runs at a time.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Make the runs with this joblib backend, as for vfl study.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the table.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the picture, the JSON and the runs to this folder.",
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
    """Rehearse attacks on the messages of RECIPE.

    The command measures what each party can infer from the messages that it receives. It runs all
    parties in this process, records the messages, and plays each attack on them. The data of all
    parties must therefore be on this machine. Use data for which that is allowed, or data that
    resemble the real data. For each leak, the table also shows the result of the same attack
    without the messages, and the metric and bytes of the run. Give several recipes, such as one for
    each defence, to compare them. The party files of all parties together are one recipe, as for
    vfl simulate.

    \b
    Examples:
      vfl leaks examples/breast-cancer.toml
      vfl leaks bank.toml ../shop/shop.toml
      vfl leaks plain.toml marvell.toml --seeds 1,2,3 --attacks norm,cosine --out leaks
    """
    # Imported here because it imports torch.
    from vfl_leaks.api import leaks as rehearse
    from vfl_leaks.table import read_list, show_leaks

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
        # If a run fails, the results of the runs before it are still shown.
        if results:
            show_leaks(results, as_json=as_json, out=out)
