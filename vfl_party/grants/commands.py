"""``vfl-party approve``, ``grants`` and ``revoke``."""

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
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import LINE, aligned, clean, to_json

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_party.assembly.files import PartyFiles
    from vfl_party.grants.grant import Grant
    from vfl_party.grants.store import Uses

# Of a grant that does not say until when.
_DAYS = 30
_PARTY = click.argument("party", type=click.Path(path_type=Path))


@click.command(epilog=EXIT_CODES)
@_PARTY
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="The recipe to allow, or recipe.json of a trained run; replaces the party file's.",
)
@click.option(
    "--runs",
    type=click.IntRange(0, 10_000),
    default=1,
    show_default=True,
    help="How many runs may be trained.",
)
@click.option(
    "--until",
    type=click.DateTime(["%Y-%m-%d"]),
    help=f"The last day of the grant, in UTC.  [default: in {_DAYS} days]",
)
@click.option(
    "--predictions",
    type=click.IntRange(0, 1_000_000_000),
    default=0,
    show_default=True,
    help="How many rows may be predicted, jointly or by serving.",
)
@click.option("--purpose", default="", help="What it is for, in words that the others read, too.")
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
    """Show what a recipe would send from the party of the file PARTY, and sign a grant for it.

    With policy.approval = "each" in the party file nothing is trained, predicted or served without
    a grant that fits: the same recipe, table and keys of the others. The others get the grant,
    check it, and keep it with the run. Its digests of the table's columns and ids have a key that
    never leaves this party. Nothing is sent by this command.

    \b
    Examples:
      vfl-party approve bank.toml --runs 3 --until 2027-01-31 --purpose "credit risk, contract 17"
      vfl-party approve bank.toml --runs 0 --predictions 50000 --recipe runs/RUN-ID/bank/recipe.json
    """
    from vfl_common.config.recipe import naming
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import needs_grants, store_of
    from vfl_party.grants.shown import described, look

    if not runs and not predictions:
        text = "--runs 0: allows nothing; give a number of runs, or --predictions"
        raise InputError(Code.CONFIG_INVALID, text)
    files = read_files(party, recipe=_recipe(recipe) if recipe is not None else None)
    _require_pins(party, files)
    with naming(recipe if recipe is not None else Path(files.file.recipe)):
        opened, found = look(files, runs, predictions)
    store = ctx.with_resource(closing(store_of(files.file)))
    facts = {"runs": runs, "predictions": predictions, "purpose": purpose}
    grant = _made(files, opened, store.secret, _last_day(until), facts)
    for line in described(grant, files, found):
        click.echo(line)
    if not needs_grants(files.file):
        click.echo(f'note: {party} does not ask for grants; set policy = {{ approval = "each" }}')
    if not yes:
        if not _is_asked():
            text = "approve: nobody can be asked here; give --yes to sign what is shown"
            raise InputError(Code.CONFIG_INVALID, text)
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
    "kept",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Check a file with a grant of any party, or the folder of a run with all of them.",
)
@click.pass_context
def grants(ctx: click.Context, party: Path, as_json: bool, kept: Path | None) -> None:
    """List the grants of the party of the file PARTY, with what is left of each.

    With --verify it shows who has allowed a run: the grants that all parties showed at its start
    are in shown.json of the run's folder, RUN/NAME. Each is checked against the CA, and against the
    run's recipe. One that does not hold ends with exit code 2.

    \b
    Examples:
      vfl-party grants bank.toml
      vfl-party grants bank.toml --verify runs/20260301-120000-churn-1f3a/bank
    """
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import store_of

    files = read_files(party)
    if kept is not None:
        for grant in _verified(kept, files):
            _say(grant, as_json=as_json)
        return
    store = ctx.with_resource(closing(store_of(files.file)))
    lines = []
    for each in store.all(files.keyring.current()):
        uses = store.uses(each.grant.grant)
        if as_json:
            click.echo(to_json(_fields(each.grant, uses), compact=True))
        lines.append(_cells(each.grant, uses))
    if as_json:
        return
    if not lines:
        click.echo(f"{files.name} has signed no grants; vfl-party approve {party} signs one")
        return
    head = ("grant", "recipe", "signed", "until", "runs left", "predictions left", "state")
    for line in aligned([(*head, "purpose"), *lines]):
        click.echo(line)


@click.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("grant")
@click.option("--why", default="", help="The reason, which is kept with it.")
@click.pass_context
def revoke(ctx: click.Context, party: Path, grant: str, why: str) -> None:
    """End a grant of the party of the file PARTY for good. GRANT is its id, or the beginning of it.

    A program that trains or serves with it stops within seconds; what has left stays where it is.

    \b
    Example: vfl-party revoke bank.toml 1f3a9c --why "contract ended"
    """
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import store_of

    files = read_files(party)
    store = ctx.with_resource(closing(store_of(files.file)))
    found = store.find(grant, files.keyring.current()).grant
    new = store.revoke(found.grant, clean(why))
    said = "allows nothing any more" if new else "was revoked before"
    click.echo(f"the grant {found.grant} of {found.party} {said}")


def _is_asked() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty()


def _recipe(path: Path) -> Recipe:
    """Reads a recipe, or that of a trained run in its folder. Raises InputError."""
    from vfl_common.config.recipe import load_recipe
    from vfl_common.run_folder import RunFolder

    if path.name == "recipe.json":
        return RunFolder(path.parent, path.resolve().parent.parent.name).recipe()
    return load_recipe(path)


def _require_pins(party: Path, files: PartyFiles) -> None:
    """Raises InputError if a receiver has no pin: a grant is for keys."""
    from vfl_common.text import listed
    from vfl_party.grants.approval import receivers

    missing = [name for name in receivers(files) if name not in files.file.pins]
    if missing:
        text = f"{party}: pins: a grant is for keys, and there is no pin of {listed(missing)}"
        ways = "ask for the line that `vfl certs show` prints there, and set it"
        raise InputError(Code.CONFIG_INVALID, f"{text}; {ways}")


def _last_day(until: datetime | None) -> str:
    """Returns the last day of a new grant. Raises InputError if it is over."""
    today = datetime.now(UTC).date()
    day = until.date() if until is not None else today + timedelta(days=_DAYS)
    if day < today:
        text = f"--until {day}: this day is over; give a day to come"
        raise InputError(Code.CONFIG_INVALID, text)
    return day.isoformat()


def _made(
    files: PartyFiles, opened: Any, secret: bytes, until: str, facts: dict[str, Any]
) -> Grant:
    from vfl_common.config.base import parse
    from vfl_party.grants.approval import PREDICT, SERVE, phases_of, receivers
    from vfl_party.grants.grant import Grant, new_id
    from vfl_party.grants.table import digests

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


def _state(grant: Grant, uses: Uses) -> str:
    from vfl_party.grants.fits import over

    if why := over(grant, uses, time.time()):
        return why
    left = grant.runs > len(uses.runs) or grant.predictions > uses.predictions
    return "allows" if left else "is used up"


def _cells(grant: Grant, uses: Uses) -> tuple[str, ...]:
    runs = f"{max(0, grant.runs - len(uses.runs)):,} of {grant.runs:,}"
    rows = f"{max(0, grant.predictions - uses.predictions):,} of {grant.predictions:,}"
    days = (grant.signed_on, grant.until)
    return (grant.grant, grant.recipe, *days, runs, rows, _state(grant, uses), grant.purpose)


def _fields(grant: Grant, uses: Uses) -> dict[str, Any]:
    return {
        **grant.model_dump(mode="json"),
        "runs_begun": sorted(uses.runs),
        "predicted": uses.predictions,
        "revoked": uses.revoked_s,
        "revoked_why": uses.why,
        "state": _state(grant, uses),
    }


def _verified(path: Path, files: PartyFiles) -> list[Grant]:
    """Returns the grants in a file or in a run's folder. Raises InputError at the first that does
    not hold.
    """
    from vfl_common.run_folder import RunFolder
    from vfl_party.grants.store import read_file, read_kept
    from vfl_party.policy.meeting import SHOWN

    credentials = files.keyring.current()
    if not path.is_dir():
        return [read_file(path, credentials).grant]
    facts = RunFolder(path, path.resolve().parent.name).facts()
    digest = facts.get("grants_for")
    if digest is None:
        text = f"{path}: is no folder of a party in a run that needed grants; give RUN/NAME"
        raise InputError(Code.FILE_INVALID, text)
    found = []
    for party, value in _shown(path / SHOWN).items():
        grant = read_kept(value, path / SHOWN, credentials).grant
        if grant.digest != digest or grant.party != party:
            text = f"{path / SHOWN}: {party} has shown a grant of {grant.party} for another recipe"
            raise InputError(Code.FILE_INVALID, text)
        found.append(grant)
    return found


def _shown(path: Path) -> dict[str, Any]:
    """Returns {party: its grant} of what all have shown when they joined. Raises InputError."""
    from vfl_party.grants.approval import GrantGuard

    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        said = {party: table.get(GrantGuard.key) for party, table in sorted(tables.items())}
        return {party: each["grant"] for party, each in said.items() if each}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        text = f"{path}: cannot be read as what parties have shown; restore it"
        raise InputError(Code.FILE_INVALID, text) from None


def _say(grant: Grant, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(grant.model_dump(mode="json"), compact=True))
        return
    said = f"{grant.party} has allowed {grant} (grant {grant.grant}, signed on {grant.signed_on})"
    click.echo(clean(said, LINE))
