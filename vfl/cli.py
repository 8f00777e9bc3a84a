"""``vfl``: a federation on one machine, its certificates, its reports."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.certs.commands import certs
from vfl.export.commands import export
from vfl_common.program import EXIT_CODES, run_program

DEMO = Path(__file__).with_name("demo.toml")

_out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of runs; each run makes one in it.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Instead of the table, summary.json as one line.")
_seed = click.option("--seed", type=click.IntRange(0), help="Instead of the recipe's.")
_keep = click.option("--keep-going", is_flag=True, help="Start a party again that was killed; it rejoins the run.")


@click.group(epilog=EXIT_CODES)
@click.version_option(package_name="vfl")
def cli() -> None:
    """Vertical federated learning: parties hold different columns about the same people and train together.

    This program runs whole federations on one machine, for trying things out, and makes certificates and reports.
    Parties on machines of their own use `vfl-server serve` and `vfl-party run`.

    \b
    Examples:
      vfl demo                              five processes learn digits, in some ten seconds
      vfl simulate examples/diabetes.toml   the same with a recipe
      vfl study examples/study/digits.toml  several methods, seeds and numbers of labels, as a table
      vfl forecast examples/digits.toml     bytes and time, before anything runs
      vfl report runs/20260101-120000-digits-1f2e
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      vfl certs ca
    """


cli.add_command(certs)
cli.add_command(export)


@cli.command(epilog=EXIT_CODES)
@_out
@_json
@_seed
@_keep
def demo(out: Path, as_json: bool, seed: int | None, keep_going: bool) -> None:
    """Run a built-in federation: a server and four parties, five processes, mutual TLS, real gRPC.

    Each party sees one quarter of scikit-learn's 8 x 8 pictures of digits; the party `bank` alone knows the digits.
    The recipe is examples/digits.toml.

    \b
    Examples:
      vfl demo
      vfl demo --json | jq .metrics.test.accuracy
    """
    _simulate(DEMO, out, as_json, seed, keep_going)


@cli.command(epilog=EXIT_CODES)
@click.argument("recipe", type=click.Path(path_type=Path))
@_out
@_json
@_seed
@_keep
def simulate(recipe: Path, out: Path, as_json: bool, seed: int | None, keep_going: bool) -> None:
    """Run the server and all parties of RECIPE as processes on this machine.

    The recipe's [simulate] table says where the parties' data come from: one data set that is divided by columns,
    quadrants or halves, or each party's own file. Certificates come from an authority made for this run alone.

    \b
    In OUT/<run id>/:
      summary.json   metrics, bytes, seconds
      federation/    certificates, party files, the recipe: what each party would have on its own machine
      <party>/       metrics.jsonl, log.jsonl, ledger.json, checkpoints/, stderr

    \b
    Examples:
      vfl simulate examples/breast-cancer.toml
      vfl simulate recipe.toml --seed 7 --json | tail -n 1 > result.json
    """
    _simulate(recipe, out, as_json, seed, keep_going)


@cli.command(epilog=EXIT_CODES)
@click.argument("study", type=click.Path(path_type=Path))
@_out
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Federations at a time.")
@click.option("--json", "as_json", is_flag=True, help="Instead of progress and table, JSON lines.")
def study(study: Path, out: Path, jobs: int, as_json: bool) -> None:
    """Run methods x seeds x numbers of labelled rows, and compare them.

    STUDY is a TOML file that names a recipe, seeds, numbers of labels, and methods with their phases
    (docs/how-to.md). Each run is a federation like those of `vfl simulate`, one after the other; a pretraining is run
    once and shared by all numbers of labels. Stopped or killed, the study goes on with the same command: finished runs
    are not repeated. A run that fails does not stop the others.

    \b
    In OUT/<study>/: a folder for each run, results.csv, results.png

    \b
    Example:
      vfl study examples/study/digits.toml
    """
    from vfl.studies.show import show_study

    show_study(study, out, jobs=jobs, as_json=as_json)


@cli.command(epilog=EXIT_CODES)
@click.argument("plan", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--bandwidth", default="100Mbit/s", show_default=True, help="Of every link: 10Mbit, 1Gbit/s, 100MB, …")
@click.option("--latency", default="20ms", show_default=True, help="One way, half of what ping says: 20ms, 0.1s, …")
@click.option(
    "--rows", type=click.IntRange(1, 100_000_000), help="How many rows all parties hold; the data are not read then."
)
@click.option(
    "--rounds", multiple=True, metavar="PHASE=N", help="As if a phase with early stopping ended after N rounds."
)
@click.option("--json", "as_json", is_flag=True, help="Instead of the tables, all of it as one JSON line.")
def forecast(
    plan: Path, bandwidth: str, latency: str, rows: int | None, rounds: tuple[str, ...], as_json: bool
) -> None:
    """Say, before anything runs, what RECIPE will send: bytes by party, phase and direction, and the time it takes.

    Instead of a recipe, a party file is taken too: its data then say how many rows there are. Every message is counted
    with the size that it will have; the sessions with the server, which grow with time, are not counted. The time is
    that of communication alone.

    \b
    Examples:
      vfl forecast examples/digits.toml
      vfl forecast recipe.toml --rows 250000 --bandwidth 1Gbit/s --latency 5ms
      vfl forecast bank.toml --json
    """
    from vfl.forecasting.network import Network
    from vfl.forecasting.show import show_forecast

    show_forecast(plan, Network.read(bandwidth, latency), rows=rows, rounds=rounds, as_json=as_json)


@cli.command(epilog=EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
def report(run: Path) -> None:
    """Print the table of RUN again, and draw its learning curves and bytes as PNG into its folder.

    RUN is the folder of a run, or its summary.json. At a passive party, which gets no summary, what it has counted.

    \b
    Example:
      vfl report runs/20260101-120000-digits-1f2e
    """
    from vfl.report.charts import draw
    from vfl.report.reading import find, own_ledger
    from vfl.report.table import show, show_own

    own = own_ledger(run)
    if own is not None:
        show_own(*own)
        click.echo(f"{run}: a passive party has no summary of the run; the server and the active party do")
        return
    found = find(run)
    show(found.summary, found.phases)
    paths = draw(found)
    for path in paths:
        click.echo(path)
    if not any(path.name == "learning-curves.png" for path in paths):
        click.echo("no learning curves: no metrics.jsonl with more than one round to draw is in this folder")


def _simulate(recipe: Path, out: Path, as_json: bool, seed: int | None, keep_going: bool) -> None:
    from vfl.simulation.run import simulate as run

    folder = run(recipe, out, seed=seed, keep_going=keep_going)
    if as_json:
        import json

        click.echo(json.dumps(json.loads((folder / "summary.json").read_bytes()), separators=(",", ":")))
        return
    from vfl.report.reading import find
    from vfl.report.table import show

    found = find(folder)
    show(found.summary, found.phases)
    click.echo(f"Learning curves and bytes as PNG: vfl report {folder}")


def main() -> None:
    run_program(cli, "vfl")


if __name__ == "__main__":
    main()
