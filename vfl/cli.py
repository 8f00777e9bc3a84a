"""``vfl``: a federation on one machine, its certificates, its reports; new federations."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

from vfl.card.commands import card
from vfl.certs.commands import certs
from vfl.export.commands import export
from vfl.forecasting.commands import forecast
from vfl.library.commands import predict
from vfl.new.commands import new
from vfl.preparing.commands import prepare
from vfl.production.commands import compare, drift, models, prune
from vfl.report.commands import report, runs
from vfl.searching.commands import study
from vfl.simulation.commands import demo, simulate
from vfl.watch.commands import watch
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES, run_program


class _Commands(click.Group):
    """Adds the commands of the entry points ``vfl.commands``: each is imported when it is listed or
    called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(each.name for each in _added())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = next((each for each in _added() if each.name == cmd_name), None)
        if found is None:
            return None
        try:
            command = found.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            text = (
                f"the command {cmd_name!r} of {found.value} cannot be loaded: {why}; reinstall "
                "or remove it"
            )
            raise InputError(Code.CONFIG_INVALID, text) from error
        if not isinstance(command, click.Command):
            text = (
                f"{found.value} is a {type(command).__name__}, and the entry point "
                "vfl.commands wants a click command"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        return command


def _added() -> list[EntryPoint]:
    return list(entry_points(group="vfl.commands"))


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings=NAMES)
@click.version_option(package_name="vfl")
def cli() -> None:
    """Vertical federated learning: parties hold different columns about the same people and train
    together.

    This program runs whole federations on one machine, to try things out, and makes the files of a
    new one, its certificates and reports. Parties on separate machines use `vfl-server serve` and
    `vfl-party run`.

    \b
    Examples:
      vfl demo                              five processes learn digits, in about ten seconds
      vfl new recipe                        a recipe and a party file from your own table
      vfl simulate examples/diabetes.toml   run your own recipe
      vfl prepare --list                    data sets of the papers, from their official files
      vfl study examples/study/digits.toml  compare methods, seeds and label counts in a table
      vfl forecast examples/digits.toml     bytes and time, before anything runs
      vfl leaks examples/breast-cancer.toml what the others could read from what was sent
      vfl runs                              a table of your runs
      vfl report                            the newest run again, with charts
      vfl watch                             a page that shows a run while it goes on
      vfl predict --data bank=new.csv --data shop=new-shop.csv
      vfl card                              a model card of the newest run
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      vfl certs ca
    """


for command in (
    card,
    certs,
    compare,
    demo,
    drift,
    export,
    forecast,
    models,
    new,
    predict,
    prepare,
    prune,
    report,
    runs,
    simulate,
    study,
    watch,
):
    cli.add_command(command)


def main() -> None:
    run_program(cli, "vfl")


if __name__ == "__main__":
    main()
