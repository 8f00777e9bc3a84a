"""The command line program ``vfl``: federations on one machine, certificates and reports."""

from __future__ import annotations

import click

from vfl_common.process.program import EXIT_CODES, NAMES, PluginGroup, run_program

# {command: module and function}. A function is imported when its command is listed or called.
_COMMANDS = {
    "certs": "vfl.commands:certs",
    "demo": "vfl.commands:demo",
    "forecast": "vfl.commands:forecast",
    "new": "vfl.new.commands:new",
    "predict": "vfl.commands:predict",
    "simulate": "vfl.commands:simulate",
}


@click.group(
    cls=PluginGroup,
    entry_point_group="vfl.commands",
    modules=_COMMANDS,
    epilog=EXIT_CODES,
    context_settings=NAMES,
)
@click.version_option(package_name="vfl")
def cli() -> None:
    """Run vertical federated learning on one machine.

    Parties hold different columns about the same people and train together. This program runs
    whole federations on one machine, to try things out. It also makes the files of a new
    federation, its certificates, and reports of its runs. On separate machines, use
    `vfl-server` and `vfl-party`.

    \b
    Examples:
      vfl demo                              five processes learn digits, in about ten seconds
      vfl new recipe                        a recipe and a party file from your own table
      vfl simulate examples/diabetes.toml   run a recipe
      vfl prepare --list                    data sets of the papers, from their official files
      vfl study examples/study/digits.toml  compare methods, seeds and label counts in a table
      vfl forecast examples/digits.toml     bytes and time, before anything runs
      vfl leaks examples/breast-cancer.toml what parties can infer from the messages
      vfl runs                              a table of your runs
      vfl report                            tables and charts of the newest run
      vfl watch                             a page that shows a run while it goes on
      vfl predict --data bank=new.csv --data shop=new-shop.csv
      vfl card                              a model card of the newest run
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      vfl certs ca
    """


def main() -> None:
    """Runs the program."""
    run_program(cli, "vfl")


if __name__ == "__main__":
    main()
