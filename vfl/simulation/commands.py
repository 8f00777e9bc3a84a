"""``vfl demo`` and ``vfl simulate``: whole federations on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.simulation import BASELINES
from vfl.summary.run_argument import out_option
from vfl_common.process.program import EXIT_CODES, WATCH, add_stop_text
from vfl_common.text import to_json

DEMO = Path(__file__).parents[1] / "demo.toml"
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print summary.json as one line instead of the table."
)
_seed = click.option("--seed", type=click.IntRange(0), help="Replace the recipe's seed.")
_keep = click.option(
    "--keep-going", is_flag=True, help="Restart a party that was killed; it rejoins the run."
)


@click.command(epilog=EXIT_CODES)
@out_option
@_json
@_seed
@_keep
@WATCH
def demo(out: Path, as_json: bool, seed: int | None, keep_going: bool, watch: bool) -> None:
    """Run a built-in federation of a server and four parties.

    The server and the parties are five processes that use gRPC with mutual TLS. Each party has one
    quarter of scikit-learn's 8 x 8 pictures of digits. Only the party `bank` has the labels. The
    recipe is examples/digits.toml.

    \b
    Examples:
      vfl demo
      vfl demo --json | jq .metrics.test.accuracy
    """
    _simulate((DEMO,), out, as_json, seed, keep_going, None, watch)


@click.command(epilog=EXIT_CODES)
@click.argument(
    "files",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@out_option
@_json
@_seed
@_keep
@WATCH
@click.option(
    "--baseline",
    type=click.Choice(BASELINES),
    help="Run a baseline instead: one party, all columns, or boosted trees.",
)
def simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    watch: bool,
    baseline: str | None,
) -> None:
    """Run the server and all parties of RECIPE on this machine.

    The recipe's [simulate] table names the parties' data: one data set that is divided by columns,
    quadrants or halves, or a file for each party. Instead of a recipe, you can give the party files
    of all its parties, to test them together without keys and a network. Their data, encoders,
    devices and threads are used. With --baseline alone or gbdt-alone, the active party's file is
    enough. A temporary certificate authority is made for each run.

    \b
    In OUT/<run id>/:
      summary.json   metrics, bytes, seconds
      federation/    certificates, party files, the recipe, as each party would have them on its own machine
      <party>/       metrics.jsonl, log.jsonl, ledger.json, checkpoints/, stderr

    \b
    Examples:
      vfl simulate examples/breast-cancer.toml
      vfl simulate recipe.toml --seed 7 --json | tail -n 1 > result.json
      vfl simulate recipe.toml --baseline combined    what would all columns in one place give?
      vfl simulate bank.toml ../shop/shop.toml        what do our tables give together?
      vfl simulate bank.toml --baseline alone         what does my own table give? (the active party's file)
    """  # noqa: E501
    _simulate(files, out, as_json, seed, keep_going, baseline, watch)


def _simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    baseline: str | None,
    watch: bool,
) -> None:
    from vfl.simulation.run import simulate as run_simulation

    with add_stop_text("the same command begins a new run"):
        folder = run_simulation(
            files[0],
            out,
            others=files[1:],
            seed=seed,
            keep_going=keep_going,
            baseline=baseline,
            watch=watch,
        )
    if as_json:
        import json

        click.echo(to_json(json.loads((folder / "summary.json").read_bytes()), compact=True))
        return
    from vfl.summary.reading import find
    from vfl.summary.table import print_tables

    result = find(folder)
    print_tables(result.summary, result.phases)
    click.echo(f"To see a page and curves of this run: vfl report {folder}")
