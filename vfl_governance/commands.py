"""Commands for grants and for the account of what a party has told its peers."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES, make_old_name
from vfl_common.text import LINE, align_columns, clean, to_json

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_governance.grants.store import Grant, Uses
    from vfl_party.assembly.files import PartyFiles

# The number of days that a grant is valid without --until.
_DAYS = 30
_PARTY = click.argument("party", type=click.Path(path_type=Path))


@click.command(epilog=EXIT_CODES)
@_PARTY
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Allow this recipe, or a run's recipe.json, instead of the party file's.",
)
@click.option(
    "--runs",
    type=click.IntRange(0, 10_000),
    default=1,
    show_default=True,
    help="Set the number of runs that may be trained.",
)
@click.option(
    "--until",
    type=click.DateTime(["%Y-%m-%d"]),
    help=f"Set the last day of the grant, in UTC.  [default: in {_DAYS} days]",
)
@click.option(
    "--predictions",
    type=click.IntRange(0, 1_000_000_000),
    default=0,
    show_default=True,
    help="Set the number of rows that may be predicted or served.",
)
@click.option("--purpose", default="", help="State a purpose, which the other parties can read.")
@click.option("--yes", is_flag=True, help="Sign without asking.")
@click.pass_context
def approve(
    ctx: click.Context,
    party: Path,
    recipe: Path | None,
    runs: int,
    until: datetime | None,
    predictions: int,
    purpose: str,
    yes: bool,
) -> None:
    """Show what a recipe would send, and sign a grant for it.

    PARTY is the party's file. If it has policy.approval = "each", the party trains, predicts or
    serves only with a grant for the same recipe, the same table and the same keys of the other
    parties. The other parties receive the grant, check it and store it with the run. The grant has
    digests of the table's columns and ids. Their key never leaves this party. This command sends
    nothing.

    \b
    Examples:
      vfl-party approve bank.toml --runs 3 --until 2027-01-31 --purpose "credit risk, contract 17"
      vfl-party approve bank.toml --runs 0 --predictions 50000 --recipe runs/RUN-ID/bank/recipe.json
    """
    from vfl_common.config.recipe import name_file_in_errors
    from vfl_governance.grants.approval import needs_grants, store_of
    from vfl_governance.grants.shown import describe, look
    from vfl_party.assembly.files import read_files

    if not runs and not predictions:
        raise InputError(
            Code.CONFIG_INVALID,
            "--runs 0: a grant for no runs and no predictions allows nothing. Set a number of "
            "runs, or --predictions.",
        )
    files = read_files(party, recipe=_read_recipe(recipe) if recipe is not None else None)
    _require_pins(party, files)
    with name_file_in_errors(recipe if recipe is not None else Path(files.file.recipe)):
        opened, outlook = look(files, runs, predictions)
    store = ctx.with_resource(closing(store_of(files.file)))
    facts = {"runs": runs, "predictions": predictions, "purpose": purpose}
    grant = _make_grant(files, opened, store.secret, _last_day(until), facts)
    for line in describe(grant, files, outlook):
        click.echo(line)
    if not needs_grants(files.file):
        click.echo(f'note: {party} does not require grants; set policy = {{ approval = "each" }}')
    if not yes:
        if not _is_interactive():
            raise InputError(
                Code.CONFIG_INVALID,
                "approve: there is no terminal to ask for confirmation. Add --yes to sign the "
                "grant.",
            )
        if not click.confirm("sign it?"):
            click.echo("nothing is signed")
            return
    path = store.add(grant, files.keyring.current())
    click.echo(f"{path}: the grant {grant.grant} is signed by {grant.party}")


@click.command(epilog=EXIT_CODES)
@_PARTY
@click.option("--json", "as_json", is_flag=True, help="Write a JSON line for each grant.")
@click.option(
    "--verify",
    "path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Check a grant's file, or all grants in a run's folder.",
)
@click.pass_context
def grants(ctx: click.Context, party: Path, as_json: bool, path: Path | None) -> None:
    """List a party's grants, with the remaining uses of each.

    PARTY is the party's file. With --verify the command shows which parties allowed a run. The
    grants that all parties sent at its start are in shown.json in the run's folder, RUN/NAME. Each
    grant is checked against the CA and against the run's recipe. If a grant is invalid, the exit
    code is 2.

    \b
    Examples:
      vfl-party grants bank.toml
      vfl-party grants bank.toml --verify runs/20260301-120000-churn-1f3a/bank
    """
    from vfl_governance.grants.approval import store_of
    from vfl_party.assembly.files import read_files

    files = read_files(party)
    if path is not None:
        for grant in _read_verified_grants(path, files):
            _print_grant(grant, as_json=as_json)
        return
    store = ctx.with_resource(closing(store_of(files.file)))
    lines = []
    for grant_ in store.all(files.keyring.current()):
        uses = store.uses(grant_.grant.grant)
        if as_json:
            click.echo(to_json(_collect_fields(grant_.grant, uses), compact=True))
        lines.append(_render_cells(grant_.grant, uses))
    if as_json:
        return
    if not lines:
        click.echo(f"{files.name} has signed no grants; vfl-party approve {party} signs one")
        return
    head = ("grant", "recipe", "signed", "until", "runs left", "predictions left", "state")
    for line in align_columns([(*head, "purpose"), *lines]):
        click.echo(line)


@click.command("revoke-grant", epilog=EXIT_CODES)
@_PARTY
@click.argument("grant")
@click.option("--why", default="", help="State the reason, which is stored with the grant.")
@click.pass_context
def revoke_grant(ctx: click.Context, party: Path, grant: str, why: str) -> None:
    """Revoke a grant permanently.

    PARTY is the party's file. GRANT is the id of the grant, or the beginning of the id. A program
    that trains or serves with the grant stops within seconds. Values that were already sent stay
    with their receivers.

    \b
    Example: vfl-party revoke-grant bank.toml 1f3a9c --why "contract ended"
    """
    from vfl_governance.grants.approval import store_of
    from vfl_party.assembly.files import read_files

    files = read_files(party)
    store = ctx.with_resource(closing(store_of(files.file)))
    revoked = store.find(grant, files.keyring.current()).grant
    new = store.revoke(revoked.grant, clean(why))
    result = "is revoked" if new else "was already revoked"
    click.echo(f"the grant {revoked.grant} of {revoked.party} {result}")


revoke = make_old_name(revoke_grant, "revoke", "vfl-party")


def _is_interactive() -> bool:
    """Returns whether a person can answer a question in the terminal."""
    return sys.stdin.isatty()


def _read_recipe(path: Path) -> Recipe:
    """Reads a recipe, or a run's recipe.json. Raises InputError if it is invalid."""
    from vfl_common.config.recipe import load_recipe
    from vfl_common.run_folder import RunFolder

    if path.name == "recipe.json":
        return RunFolder(path.parent, path.resolve().parent.parent.name).recipe()
    return load_recipe(path)


def _require_pins(party: Path, files: PartyFiles) -> None:
    """Raises InputError if a receiver has no pin, because a grant names the receivers' keys."""
    from vfl_common.text import list_names
    from vfl_governance.grants.approval import receivers

    missing = [name for name in receivers(files) if name not in files.file.pins]
    if missing:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{party}: pins: a grant names keys, but the pin of {list_names(missing)} is missing. "
            "Ask that party for the line that `vfl certs show` prints, and add it.",
        )


def _last_day(until: datetime | None) -> str:
    """Returns the last day of a new grant. Raises InputError if this day is in the past."""
    today = datetime.now(UTC).date()
    day = until.date() if until is not None else today + timedelta(days=_DAYS)
    if day < today:
        raise InputError(
            Code.CONFIG_INVALID, f"--until {day}: this day is in the past. Set a day in the future."
        )
    return day.isoformat()


def _make_grant(
    files: PartyFiles, opened: Any, secret: bytes, until: str, facts: dict[str, Any]
) -> Grant:
    from vfl_common.config.base import parse
    from vfl_governance.grants.approval import PREDICT, SERVE, phases_of, receivers
    from vfl_governance.grants.store import Grant, digests, new_id

    columns, ids = digests(opened, secret)
    phases = phases_of(files) if facts["runs"] else ()
    return parse(
        Grant,
        {
            "grant": new_id(),
            "party": files.name,
            "recipe": files.recipe.name,
            "digest": files.recipe.digest(),
            "columns": columns,
            "ids": ids,
            "peers": {name: files.file.pins[name] for name in receivers(files)},
            "phases": [*phases, *((PREDICT, SERVE) if facts["predictions"] else ())],
            "until": until,
            "at": time.time(),
            **facts,
        },
        "approve",
    )


def _describe_state(grant: Grant, uses: Uses) -> str:
    from vfl_governance.grants.approval import over

    if why := over(grant, uses, time.time()):
        return why
    has_uses_left = grant.runs > len(uses.runs) or grant.predictions > uses.predictions
    return "allows" if has_uses_left else "is used up"


def _render_cells(grant: Grant, uses: Uses) -> tuple[str, ...]:
    runs = f"{max(0, grant.runs - len(uses.runs)):,} of {grant.runs:,}"
    rows = f"{max(0, grant.predictions - uses.predictions):,} of {grant.predictions:,}"
    days = (grant.signed_on, grant.until)
    return (
        grant.grant,
        grant.recipe,
        *days,
        runs,
        rows,
        _describe_state(grant, uses),
        grant.purpose,
    )


def _collect_fields(grant: Grant, uses: Uses) -> dict[str, Any]:
    return {
        **grant.model_dump(mode="json"),
        "runs_begun": sorted(uses.runs),
        "predicted": uses.predictions,
        "revoked": uses.revoked_s,
        "revoked_why": uses.why,
        "state": _describe_state(grant, uses),
    }


def _read_verified_grants(path: Path, files: PartyFiles) -> list[Grant]:
    """Returns the verified grants in a file or in a run's folder.

    Raises InputError at the first invalid grant.
    """
    from vfl_common.run_folder import RunFolder
    from vfl_governance.grants.store import read_file, read_kept
    from vfl_party.policy.meeting import SHOWN

    credentials = files.keyring.current()
    if not path.is_dir():
        return [read_file(path, credentials).grant]
    facts = RunFolder(path, path.resolve().parent.name).facts()
    digest = facts.get("grants_for")
    if digest is None:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a party's folder of a run that needed grants. Give RUN/NAME.",
        )
    grants_ = []
    for party, value in _read_shown(path / SHOWN).items():
        grant = read_kept(value, path / SHOWN, credentials).grant
        if grant.digest != digest or grant.party != party:
            raise InputError(
                Code.FILE_INVALID,
                f"{path / SHOWN}: {party} sent a grant of {grant.party} that is not for this run's "
                f"recipe. Ask {party} for the grant of this run.",
            )
        grants_.append(grant)
    return grants_


def _read_shown(path: Path) -> dict[str, Any]:
    """Returns {party: grant} for the grants that the parties sent when they joined.

    Raises InputError if the file cannot be read.
    """
    from vfl_governance.grants.approval import GrantGuard

    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        values = {party: table.get(GrantGuard.key) for party, table in sorted(tables.items())}
        return {party: value["grant"] for party, value in values.items() if value}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a readable file of the parties' grants. Restore it from a backup.",
        ) from None


def _print_grant(grant: Grant, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(grant.model_dump(mode="json"), compact=True))
        return
    line = f"{grant.party} has allowed {grant} (grant {grant.grant}, signed on {grant.signed_on})"
    click.echo(clean(line, LINE))


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
    from vfl_governance.account.store import standing, sum_spent, table
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
