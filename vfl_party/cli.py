"""``vfl-party``: a party of a federation, active or passive, on its own machine."""

from __future__ import annotations

from pathlib import Path

import click

from vfl_common.logs import Console
from vfl_common.program import EXIT_CODES, run_program

_DEVICE = click.option("--device", metavar="cpu|cuda|cuda:N", help="Instead of the party file's.")
_WAIT = click.option(
    "--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for a server that does not answer."
)


@click.group(epilog=EXIT_CODES)
@click.version_option(package_name="vfl")
def cli() -> None:
    """A party of a federation: it holds columns about some people and trains with others who hold other columns."""


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@_DEVICE
@_WAIT
@click.option("--fresh", is_flag=True, help="Do not offer to go on with an unfinished run of this recipe.")
def run(party: Path, device: str | None, wait_s: float, fresh: bool) -> None:
    """Takes part in a training run, as the party that the file PARTY describes.

    Started again with the same command after a crash, it rejoins the run.
    """
    from vfl_party.app import PartyApp, read_place

    place = read_place(party, device=device)
    console = Console("vfl-party")
    _, folder = PartyApp(place, console, wait_s).train(fresh=fresh)
    console.emit("completed", run_id=folder.run_id, folder=str(folder.path))


def main() -> None:
    run_program(cli, "vfl-party")
