"""``vfl``: a federation on one machine, its certificates, its reports; new federations."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES, run_program

# {command: where it is}. Each is imported when it is listed or called.
_OURS = {
    "card": "vfl.card.commands:card",
    "certs": "vfl.certs.commands:certs",
    "compare": "vfl.production.commands:compare",
    "demo": "vfl.simulation.commands:demo",
    "drift": "vfl.production.commands:drift",
    "export": "vfl.export.commands:export",
    "forecast": "vfl.forecasting.commands:forecast",
    "models": "vfl.production.commands:models",
    "new": "vfl.new.commands:new",
    "predict": "vfl.library.commands:predict",
    "prepare": "vfl.preparing.commands:prepare",
    "prune": "vfl.production.commands:prune",
    "report": "vfl.report.commands:report",
    "runs": "vfl.report.commands:runs",
    "simulate": "vfl.simulation.commands:simulate",
    "study": "vfl.searching.commands:study",
    "watch": "vfl.watch.commands:watch",
}


class _Commands(click.Group):
    """Has our commands, and those of the entry points ``vfl.commands``."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted({*_OURS, *(each.name for each in _added())})

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OURS:
            module, _, name = _OURS[cmd_name].partition(":")
            own: click.Command = getattr(import_module(module), name)
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


def main() -> None:
    run_program(cli, "vfl")


if __name__ == "__main__":
    main()
