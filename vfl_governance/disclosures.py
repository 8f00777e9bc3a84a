"""``vfl-party disclosures``: shows, checks, signs and exports what a party has sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES
from vfl_common.text import align_columns, count, to_json

if TYPE_CHECKING:
    from vfl_common.identity.credentials import Credentials
    from vfl_party.assembly.files import PartyFiles
    from vfl_party.record.history import DisclosureSum
    from vfl_party.record.lines import Route

_PARTY = click.argument("party", type=click.Path(path_type=Path))


@click.group(epilog=EXIT_CODES, context_settings=NAMES)
def disclosures() -> None:
    """Show, check and sign what this party has sent.

    The party writes a line about every bundle of numbers to its record before it sends the bundle.
    The record is .record-NAME in the folder of the runs, or record.folder of the party file.
    """


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.option(
    "--run",
    metavar="RUN",
    help="Show only this run: its id, latest, or production.",
)
@click.option("--peer", metavar="NAME", help="Show only what this party, or the server, received.")
@click.option("--phase", metavar="PHASE", help="Show only what was sent in this phase.")
@click.option("--kind", metavar="KIND", help="Show only this kind: embedding, gradient, …")
@click.option(
    "--id",
    "cells",
    multiple=True,
    metavar="ID",
    help="Show only bundles about this id; repeat for several id columns.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Write a JSON line for each row of the table."
)
@click.option(
    "--each", "per_bundle", is_flag=True, help="With --json, write a line for each bundle."
)
def show(
    party: Path,
    run: str | None,
    peer: str | None,
    phase: str | None,
    kind: str | None,
    cells: tuple[str, ...],
    as_json: bool,
    per_bundle: bool,
) -> None:
    """Show what was sent, by run, receiver and exchange.

    "people" is the number of rows with values of their own in the bundles. Sums, means and weights
    are about no single person, so they have 0. "numbers" are counted before the codec, "bytes"
    after it. With --id, ID is an id in the party's table, in any form that the id rules make equal.
    The numbers about this person have a separate column. The masked ids of an alignment by psi are
    not counted; the encodings of a fuzzy linkage are.

    The command also checks the record, as verify does. If the record is not as it was signed, the
    last sentence says why, and the exit code is 2.

    \b
    Examples:
      vfl-party disclosures show bank.toml
      vfl-party disclosures show bank.toml --id K-1017
      vfl-party disclosures show bank.toml --run 20260301-120000-churn-1f3a --json --each
    """

    from vfl_party.record.history import RecordHistory, sum_disclosures
    from vfl_party.record.verify import require

    if per_bundle and not as_json:
        raise InputError(Code.CONFIG_INVALID, "--each: needs JSON lines. Add --json.")
    files = _read_files(party)
    run = _find_run(files, run) if run is not None else None
    history = RecordHistory(_record_folder(files))
    history.check_known(run=run, peer=peer, phase=phase, kind=kind)
    bundles = history.disclosures(run=run, peer=peer, phase=phase, kind=kind)
    if cells:
        bundles = history.about(_normalised_ids(files, cells), bundles)
    if per_bundle:
        for bundle in bundles:
            click.echo(to_json(bundle.fields, compact=True))
    else:
        sums = {
            key: total for key, total in sum_disclosures(bundles).items() if peer in (None, key[1])
        }
        for line in json_lines(sums) if as_json else table(sums, of_person=bool(cells)):
            click.echo(line)
    require(_record_folder(files), files.keyring.current())


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.option(
    "--evidence",
    type=click.Path(path_type=Path),
    nargs=2,
    default=None,
    metavar="PEER FILE",
    help="Check a file of evidence that the record of PEER was rewritten.",
)
@click.option(
    "--statement",
    "statement_",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check a statement that a party exported.",
)
@click.option(
    "--copy",
    type=click.Path(path_type=Path),
    nargs=2,
    default=None,
    metavar="PEER FOLDER",
    help="Check a copy of PEER's record, which PEER wrote with copy.",
)
def verify(
    party: Path,
    evidence: tuple[Path, Path] | None,
    statement_: Path | None,
    copy: tuple[Path, Path] | None,
) -> None:
    """Check this party's record against all signed heads.

    This party and its peers have signed these heads.

    If a line was changed, removed, moved or truncated, the exit code is 2, with a sentence for each
    head that does not match. The same applies if signed heads are missing. If the whole record was
    rewritten, with its heads, the peers find this at the next run, because they have stored the old
    heads.

    With --evidence the exit code is 0 if PEER signed two heads that contradict each other. The
    heads have different roots for the same number of lines, or the later head has fewer lines, or
    PEER signed an invalid proof between them. Otherwise the exit code is 2.
    """

    from vfl_party.record.note import verify_evidence as check_evidence
    from vfl_party.record.verify import verify as check_record

    files = _read_files(party)
    credentials = files.keyring.current()
    if evidence is not None:
        click.echo(check_evidence(evidence[1], str(evidence[0]), credentials))
        return
    if statement_ is not None:
        document, signer = open_statement(statement_, credentials)
        click.echo(f"{statement_}: signed by {signer}, for run {document['predicate']['run']}")
        return
    folder, owner = (
        (copy[1], str(copy[0])) if copy is not None else (_record_folder(files), files.name)
    )
    check = check_record(folder, credentials, owner)
    click.echo(f"{count(check.lines, 'line')}, {count(check.heads, 'signed head')}")
    for name, lines in check.signers.items():
        click.echo(f"{name} has signed the first {count(lines, 'line')}")
    if check.covered < check.lines:
        click.echo(f"not signed yet: the last {count(check.lines - check.covered, 'line')}")
    for name, records in check.records.items():
        listing = ", ".join(records)
        click.echo(f"{name} sent heads of {len(records)} records: {listing}; ask {name} why")
    for problem in check.wrong:
        click.echo(f"wrong: {problem}")
    if check.wrong:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: the record is not as it was signed. Restore it from a copy.",
        )


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("out", type=click.Path(path_type=Path))
def copy(party: Path, out: Path) -> None:
    """Copy the record without its key for an auditor.

    OUT is a new folder. The copy has the lines and the signed heads. Any party of the federation
    can check them with verify --copy. Nobody can look up a person in the copy, because this needs
    the key, people.secret.
    """
    from vfl_party.record.verify import copy as copy_record

    folder = _record_folder(_read_files(party))
    copy_record(folder, out)
    click.echo(f"{out}: a copy of {folder} without its key")


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def export(party: Path, run: str, out: Path) -> None:
    """Sign a statement of what was sent in a training run.

    RUN is the id of a run, latest or production (see vfl models). OUT is the file to write.

    The statement is an in-toto Statement in a DSSE envelope, signed with the key of the party's
    certificate. Its subject is the party's newest checkpoint of the run. It has no ids and no row
    numbers. If the record is not as it was signed, nothing is signed.
    """
    from vfl_common.files import PLAIN_NAME, write_atomic
    from vfl_party.record.verify import require

    files = _read_files(party)
    run = _find_run(files, run)
    folder = Path(files.file.out) / run / files.name
    if not PLAIN_NAME.fullmatch(run):
        raise InputError(
            Code.CONFIG_INVALID,
            f"RUN: not the id of a run (got {run!r}). Choose a run that `vfl models` lists.",
        )
    facts = _read_facts(folder)
    require(_record_folder(files), files.keyring.current())
    document = statement(_record_folder(files), folder, files.name, facts)
    write_atomic(out, to_json(seal(document, files.keyring.current())) + "\n")
    click.echo(f"{out}: {len(document['predicate']['left'])} exchanges, signed by {files.name}")


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("peer")
def accept(party: Path, peer: str) -> None:
    """Accept any next head of PEER's record.

    Do this only if you know why the peer has a new record, for example because it lost a disk. The
    previous heads stay in a file in the same folder as evidence.
    """
    from vfl_party.record.heads import accept as rename_heads

    files = _read_files(party)
    old_heads = rename_heads(_record_folder(files), peer)
    click.echo(f"the next head of {peer} will be accepted; its previous heads are in {old_heads}")


def _read_files(party: Path) -> PartyFiles:
    from vfl_party.assembly.files import read_files

    return read_files(party)


def _find_run(files: PartyFiles, run: str) -> str:
    from vfl_common.registry import WORDS, ModelRegistry

    if run not in WORDS:
        return run
    return ModelRegistry(Path(files.file.out), files.name).find(run, files.recipe.name)


def _record_folder(files: PartyFiles) -> Path:
    from vfl_party.record.book import folder_of

    return folder_of(Path(files.file.record.folder or files.file.out), files.name)


def _normalised_ids(files: PartyFiles, cells: tuple[str, ...]) -> list[str]:
    """Returns an id in each normalised form that the recipe and existing runs use."""
    from vfl_common.errors import VflError
    from vfl_common.run_folder import RunFolder
    from vfl_party.predict.forget import person

    person_ = person(cells, files.data)
    normalised = [person_.normalise_id(None), person_.normalise_id(files.recipe)]
    for path in Path(files.file.out).glob(f"*/{files.name}/run.json"):
        try:
            normalised.append(
                person_.normalise_id(RunFolder(path.parent, path.parent.parent.name).recipe())
            )
        except VflError:
            continue
    return [*dict.fromkeys(spelling for spelling in normalised if spelling is not None)]


def _read_facts(folder: Path) -> dict[str, object]:
    from vfl_common.run_folder import RunFolder

    facts = RunFolder(folder, folder.parent.name).facts()
    return {"recipe": facts.get("recipe_digest", ""), "plugins": facts.get("plugins", {})}


PAYLOAD = "application/vnd.in-toto+json"


STATEMENT = "https://in-toto.io/Statement/v1"


# The name of the predicate type. It is a tag URI and not the address of a page.
PREDICATE = "tag:vfl,2026:disclosures/v1"


# Signed statements of what a party sent in a run, for the receiver of the model.
#
# A statement is an in-toto Statement in a DSSE envelope.
def statement(folder: Path, run: Path, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the statement about a party's part in a run.

    Args:
        folder: The folder of the record.
        run: The party's folder of the run. Its newest checkpoint is the subject of the statement.
        name: The party's name.
        facts: More values about the run, such as its recipe and plug-ins.

    Raises InputError if the record does not have this run, or if the run has no checkpoint.
    """
    from vfl_party.record.heads import read_signed_heads
    from vfl_party.record.history import RecordHistory, sum_disclosures

    run_id = run.parent.name
    # A served model sends values after training, which are not part of the statement.
    disclosures = RecordHistory(folder).disclosures(run=run_id)
    sums = sum_disclosures(value for value in disclosures if value.way.job != "serve")
    if not sums:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{folder}: the record has no run {run_id}. Choose one that `vfl-party disclosures "
            "show` lists.",
        )
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*.safetensors"))
    if not checkpoints:
        raise InputError(
            Code.FILE_INVALID,
            f"{run}: has no checkpoint. Give the folder of runs in which {name} was trained.",
        )
    heads = read_signed_heads(folder)
    lines = [
        {
            "to": to,
            **{key: value for key, value in way.fields.items() if key != "run"},
            **total.fields,
        }
        for (_, to, way), total in sums.items()
    ]
    return {
        "_type": STATEMENT,
        "subject": [
            {
                "name": f"{run_id}/{name}/{checkpoints[-1].name}",
                "digest": {"sha256": sha256(checkpoints[-1].read_bytes()).hexdigest()},
            }
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "party": name,
            "run": run_id,
            **facts,
            "left": lines,
            "head": str(heads[-1].note) if heads else "",
            "certificates": heads[-1].certificates if heads else {},
        },
    }


def seal(document: dict[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Returns the envelope of a statement, signed with the party's key."""
    from vfl_common.identity.signing import Envelope

    return Envelope.seal(PAYLOAD, document, credentials).value


def open_statement(path: Path, credentials: Credentials) -> tuple[dict[str, Any], str]:
    """Reads a statement from a file. Returns the statement and the name of the party that signed
    it.

    Raises InputError if the file is not a statement, or not signed with a certificate of the CA.
    """
    from vfl_common.identity.signing import Envelope

    try:
        envelope = Envelope.read(json.loads(path.read_text(encoding="utf-8")), PAYLOAD)
        document = envelope.statement
        party, _run = str(document["predicate"]["party"]), str(document["predicate"]["run"])
        if document["predicateType"] != PREDICATE:
            raise ValueError("the file is another kind of statement")
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a statement of what a party sent. Give a file that `vfl-party "
            "disclosures export` wrote.",
        ) from None
    envelope.verify_stored(path, party, credentials)
    return document, party


_NUMBERS = ("bundles", "people", "numbers", "of the person", "bytes")


_HEAD = (
    "run",
    "to",
    "phase",
    "exchange",
    "kind",
    "bundles",
    "people",
    "numbers",
    "of the person",
    "bytes",
    "as",
)


def json_lines(sums: Mapping[tuple[str, str, Route], DisclosureSum]) -> list[str]:
    """Returns a line of JSON for each receiver and exchange of a run."""
    return [
        to_json({"to": to, **way.fields, **total.fields}, compact=True)
        for (_, to, way), total in sums.items()
    ]


def table(
    sums: Mapping[tuple[str, str, Route], DisclosureSum], *, of_person: bool = False
) -> list[str]:
    """Returns a table with a header and a line for each receiver and exchange of a run.

    Without any disclosures, it returns one sentence. The bytes are those of messages, because a
    request to a served model has ids but no tensors. ``of_person``: Whether the table has a column
    with the numbers about the person of a query.
    """
    if not sums:
        return [
            "nothing was sent about this person, except masked ids if the table was aligned by psi"
            if of_person
            else "nothing was sent"
        ]
    rows = [
        (
            run,
            to,
            way.phase,
            way.exchange,
            way.kind,
            f"{total.bundles:,}",
            f"{total.people:,}",
            f"{total.numbers:,}",
            "" if total.of_person is None else f"{total.of_person:,}",
            f"{total.message_bytes:,}",
            "; ".join(part for part in (way.chain, way.how) if part),
        )
        for (run, to, way), total in sums.items()
    ]
    columns = [place for place, name in enumerate(_HEAD) if of_person or name != "of the person"]
    return align_columns(([row[place] for place in columns] for row in (_HEAD, *rows)), _NUMBERS)
