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
    """Show what each peer has received, and the remaining amounts.

    All runs about the same people are added up. Tables that have people in common are one data set,
    whatever their files are called. Rows with "a person" show the largest total of any person. ε
    includes training with dp, the transform clipped_gaussian and, once, task.label_epsilon. It does
    not include numbers that were sent without differential privacy.

    The totals come from the party's record, so they include what a killed run has sent.

    \b
    Examples:
      vfl-party account bank.toml
      vfl-party account bank.toml --json
    """
    from vfl_common.config.party import load_party
    from vfl_governance.account.limits import limits_of
    from vfl_governance.account.spent import sum_spent, table
    from vfl_governance.account.store import standing
    from vfl_party.record.book import folder_of

    file = load_party(party)
    limits = limits_of(file)
    sums = standing(folder_of(Path(file.record.folder or file.out), file.name)).sums
    balances = [*sum_spent(sums, limits.delta)]
    if as_json:
        for balance in balances:
            click.echo(to_json(balance.fields(limits), compact=True))
        return
    if not balances:
        click.echo("nothing was sent")
        return
    for line in table(balances, limits):
        click.echo(line)
