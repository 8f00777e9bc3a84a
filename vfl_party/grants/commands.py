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
from vfl_common.text import LINE, align_columns, clean, to_json

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_party.assembly.files import PartyFiles
    from vfl_party.grants.grant import Grant
    from vfl_party.grants.store import Uses

# Days that a grant is valid without --until.
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
    help="Set how many runs may be trained.",
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
    help="Set how many rows may be predicted, jointly or by serving.",
)
@click.option("--purpose", default="", help="State a purpose, which the others read, too.")
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

    PARTY is the party's file. With policy.approval = "each" in it nothing is trained, predicted or
    served without a grant that fits: the same recipe, table and keys of the others. The others
    receive the grant, check it, and keep it with the run. Its digests of the table's columns and
    ids have a key that never leaves this party. Nothing is sent by this command.

    \b
    Examples:
      vfl-party approve bank.toml --runs 3 --until 2027-01-31 --purpose "credit risk, contract 17"
      vfl-party approve bank.toml --runs 0 --predictions 50000 --recipe runs/RUN-ID/bank/recipe.json
    """
    from vfl_common.config.recipe import naming
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import needs_grants, store_of
    from vfl_party.grants.shown import describe, look

    if not runs and not predictions:
        raise InputError(
            Code.CONFIG_INVALID, "--runs 0: allows nothing. Set a number of runs, or --predictions."
        )
    files = read_files(party, recipe=_recipe(recipe) if recipe is not None else None)
    _require_pins(party, files)
    with naming(recipe if recipe is not None else Path(files.file.recipe)):
        opened, outlook = look(files, runs, predictions)
    store = ctx.with_resource(closing(store_of(files.file)))
    facts = {"runs": runs, "predictions": predictions, "purpose": purpose}
    grant = _make(files, opened, store.secret, _last_day(until), facts)
    for line in describe(grant, files, outlook):
        click.echo(line)
    if not needs_grants(files.file):
        click.echo(f'note: {party} does not ask for grants; set policy = {{ approval = "each" }}')
    if not yes:
        if not _is_asked():
            raise InputError(
                Code.CONFIG_INVALID,
                "approve: nobody can be asked here. Add --yes to sign what is shown.",
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
    """List a party's grants, with what is left of each.

    PARTY is the party's file. With --verify it shows which parties have allowed a run: the grants
    that all parties showed at its start are in shown.json of the run's folder, RUN/NAME. Each is
    checked against the CA, and against the run's recipe. An invalid one
    ends with exit code 2.

    \b
    Examples:
      vfl-party grants bank.toml
      vfl-party grants bank.toml --verify runs/20260301-120000-churn-1f3a/bank
    """
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import store_of

    files = read_files(party)
    if path is not None:
        for grant in _verify(path, files):
            _print(grant, as_json=as_json)
        return
    store = ctx.with_resource(closing(store_of(files.file)))
    lines = []
    for signed in store.all(files.keyring.current()):
        uses = store.uses(signed.grant.grant)
        if as_json:
            click.echo(to_json(_fields(signed.grant, uses), compact=True))
        lines.append(_cells(signed.grant, uses))
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
@click.option("--why", default="", help="State the reason, which is kept with the grant.")
@click.pass_context
def revoke_grant(ctx: click.Context, party: Path, grant: str, why: str) -> None:
    """End a grant for good.

    PARTY is the party's file, GRANT the id of the grant, or the beginning of it.
    A program that trains or serves with it stops within seconds; what has left stays where it is.

    \b
    Example: vfl-party revoke-grant bank.toml 1f3a9c --why "contract ended"
    """
    from vfl_party.assembly.files import read_files
    from vfl_party.grants.approval import store_of

    files = read_files(party)
    store = ctx.with_resource(closing(store_of(files.file)))
    revoked = store.find(grant, files.keyring.current()).grant
    new = store.revoke(revoked.grant, clean(why))
    result = "allows nothing any more" if new else "was revoked before"
    click.echo(f"the grant {revoked.grant} of {revoked.party} {result}")


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
    from vfl_common.text import list_names
    from vfl_party.grants.approval import receivers

    missing = [name for name in receivers(files) if name not in files.file.pins]
    if missing:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{party}: pins: a grant is for keys, and the pin of {list_names(missing)} is missing. "
            "Ask for the line that `vfl certs show` prints there, and set it.",
        )


def _last_day(until: datetime | None) -> str:
    """Returns the last day of a new grant. Raises InputError if it is over."""
    today = datetime.now(UTC).date()
    day = until.date() if until is not None else today + timedelta(days=_DAYS)
    if day < today:
        raise InputError(
            Code.CONFIG_INVALID, f"--until {day}: this day is over. Set a day in the future."
        )
    return day.isoformat()


def _make(
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


def _verify(path: Path, files: PartyFiles) -> list[Grant]:
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
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a party's folder of a run that needed grants. Give RUN/NAME.",
        )
    grants_ = []
    for party, value in _read_shown(path / SHOWN).items():
        grant = read_kept(value, path / SHOWN, credentials).grant
        if grant.digest != digest or grant.party != party:
            raise InputError(
                Code.FILE_INVALID,
                f"{path / SHOWN}: {party} has shown a grant of {grant.party} for another recipe. "
                f"Ask {party} for the grant of this run.",
            )
        grants_.append(grant)
    return grants_


def _read_shown(path: Path) -> dict[str, Any]:
    """Returns {party: its grant} of what all have shown when they joined. Raises InputError."""
    from vfl_party.grants.approval import GrantGuard

    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        values = {party: table.get(GrantGuard.key) for party, table in sorted(tables.items())}
        return {party: value["grant"] for party, value in values.items() if value}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: does not hold what the parties have shown. Restore it from a backup.",
        ) from None


def _print(grant: Grant, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(grant.model_dump(mode="json"), compact=True))
        return
    line = f"{grant.party} has allowed {grant} (grant {grant.grant}, signed on {grant.signed_on})"
    click.echo(clean(line, LINE))
