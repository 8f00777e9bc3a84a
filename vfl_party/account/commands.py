"""``vfl-party account``."""

from __future__ import annotations

from pathlib import Path

import click

from vfl_common.process.program import EXIT_CODES, NAMES
from vfl_common.text import to_json


@click.command(epilog=EXIT_CODES, context_settings=NAMES)
@click.argument("party", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write a JSON line for each peer.")
def account(party: Path, as_json: bool) -> None:
    """Show what all runs together have told each peer about the same people, and what is left of
    the limits.

    Tables that have people in common are one data set, whatever their files are called. Of a person
    the most of any person is shown. ε counts training with dp, the transform clipped_gaussian and,
    once, task.label_epsilon; numbers without privacy left as well, and ε says nothing about them.
    The sums are made from the party's record, so a killed run counts what it has sent.

    \b
    Examples:
      vfl-party account bank.toml
      vfl-party account bank.toml --json
    """
    from vfl_common.config.party import load_party
    from vfl_party.account.limits import limits_of
    from vfl_party.account.spent import spent, table
    from vfl_party.account.store import standing
    from vfl_party.record.book import folder_of

    file = load_party(party)
    limits = limits_of(file)
    sums = standing(folder_of(Path(file.record.folder or file.out), file.name)).sums
    found = [*spent(sums, limits.delta)]
    if as_json:
        for each in found:
            click.echo(to_json(each.fields(limits), compact=True))
        return
    if not found:
        click.echo("nothing has left")
        return
    for line in table(found, limits):
        click.echo(line)
