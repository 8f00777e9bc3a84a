"""The command ``vfl forecast``, which forecasts the bytes and the time of a run."""

from __future__ import annotations

from pathlib import Path

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@click.argument(
    "plan",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--bandwidth",
    default="100Mbit/s",
    show_default=True,
    help="Set the bandwidth of each link: 10Mbit, 1Gbit/s, 100MB, …",
)
@click.option(
    "--latency",
    default="20ms",
    show_default=True,
    help="Set the one-way latency (half of ping's time): 20ms, 0.1s, …",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 100_000_000),
    help="Assume this number of common rows instead of reading data.",
)
@click.option(
    "--rounds",
    multiple=True,
    metavar="PHASE=N",
    help="Count N rounds for a phase with early stopping.",
)
@click.option(
    "--step-time", default="0", show_default=True, help="Set the computing time of a step: 1.5ms, …"
)
@click.option(
    "--measure", is_flag=True, help="Measure the computing time of a step in this process."
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Set the cores of the machine that all parties share.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Include the time of masking ids with this many processes.",
)
@click.option(
    "--suggest",
    is_flag=True,
    help="Suggest codecs and steps in flight for this link.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the tables.")
def forecast(
    plan: tuple[Path, ...],
    bandwidth: str,
    latency: str,
    rows: int | None,
    rounds: tuple[str, ...],
    step_time: str,
    measure: bool,
    cores: int | None,
    workers: int | None,
    suggest: bool,
    as_json: bool,
) -> None:
    """Forecast the bytes and the time of RECIPE before it runs.

    The bytes are counted for each party, phase and direction. RECIPE may also be a party file,
    whose data then give the number of rows. The party files of all parties together are one recipe,
    as for vfl simulate. --rows is the number of rows that all parties hold, or, with rows.align =
    "none", that each passive party holds. Messages are counted with their exact sizes. The sessions
    with the server are not counted, because they grow with time. The time includes communication,
    and computation with --step-time or --measure. --workers measures the time to mask one batch of
    ids, with one core for each process.

    \b
    Examples:
      vfl forecast examples/digits.toml
      vfl forecast recipe.toml --rows 250000 --bandwidth 1Gbit/s --latency 5ms
      vfl forecast recipe.toml --bandwidth 10Mbit/s --latency 25ms --step-time 2ms --suggest
      vfl forecast bank.toml --json
      vfl forecast bank.toml ../shop/shop.toml --measure
    """
    from vfl.forecasting.network import Network
    from vfl.forecasting.show import show_forecast

    if measure and step_time != "0":
        raise InputError(
            Code.CONFIG_INVALID, "--step-time: cannot be combined with --measure. Give one of them."
        )
    if cores is not None and not measure:
        raise InputError(
            Code.CONFIG_INVALID,
            "--cores: needs --measure, which measures all parties. Add --measure.",
        )
    network = Network.read(bandwidth, latency, step_time, cores)
    show_forecast(
        plan,
        network,
        rows=rows,
        rounds=rounds,
        as_json=as_json,
        measure=measure,
        suggest=suggest,
        workers=workers,
    )
