"""``vfl-party disclosures``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, NAMES
from vfl_common.text import count, to_json

if TYPE_CHECKING:
    from vfl_party.assembly.files import PartyFiles

_PARTY = click.argument("party", type=click.Path(path_type=Path))


@click.group(epilog=EXIT_CODES, context_settings=NAMES)
def disclosures() -> None:
    """Show, check and sign what has left this party.

    Every bundle of numbers is written into the party's record before it is sent: .record-NAME
    in the folder of the runs, or record.folder of the party file.
    """


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.option(
    "--run",
    metavar="RUN",
    help="Show only this run: its id, latest, or production.",
)
@click.option("--peer", metavar="NAME", help="Show only what this party, or the server, received.")
@click.option("--phase", metavar="PHASE", help="Show only what left in this phase.")
@click.option("--kind", metavar="KIND", help="Show only this kind: embedding, gradient, …")
@click.option(
    "--id",
    "cells",
    multiple=True,
    metavar="ID",
    help="Show only bundles about this id; repeat for several id columns.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON lines, one for each sum.")
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
    """Show what has left, by run, receiver and exchange.

    People are rows of which a bundle tells one by one; sums, means and weights tell of nobody
    alone, and have 0. Numbers are counted before the codec, bytes as they crossed. With --id, ID is
    as the party's own table has it, or in any spelling that the rules of its ids make the same; the
    numbers about this person have a separate column. The masked ids of an alignment are counted
    for nobody.

    The record is checked, too, as verify does: if it is not as it was signed, the last sentence
    says what is wrong, and the exit code is 2.

    \b
    Examples:
      vfl-party disclosures show bank.toml
      vfl-party disclosures show bank.toml --id K-1017
      vfl-party disclosures show bank.toml --run 20260301-120000-churn-1f3a --json --each
    """
    from vfl_party.disclosures.tables import json_lines, table
    from vfl_party.record.history import RecordHistory, sum_disclosures
    from vfl_party.record.verify import require

    if per_bundle and not as_json:
        raise InputError(Code.CONFIG_INVALID, "--each: needs JSON lines. Add --json.")
    files = _files(party)
    run = _run_meant(files, run) if run is not None else None
    history = RecordHistory(_folder(files))
    history.check_known(run=run, peer=peer, phase=phase, kind=kind)
    bundles = history.disclosures(run=run, peer=peer, phase=phase, kind=kind)
    if cells:
        bundles = history.about(_spellings(files, cells), bundles)
    if per_bundle:
        for bundle in bundles:
            click.echo(to_json(bundle.fields, compact=True))
    else:
        sums = {key: one for key, one in sum_disclosures(bundles).items() if peer in (None, key[1])}
        for line in json_lines(sums) if as_json else table(sums, of_person=bool(cells)):
            click.echo(line)
    require(_folder(files), files.keyring.current())


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
    help="Check a statement that a party has exported.",
)
@click.option(
    "--copy",
    type=click.Path(path_type=Path),
    nargs=2,
    default=None,
    metavar="PEER FOLDER",
    help="Check a copy of PEER's record, as its copy wrote it.",
)
def verify(
    party: Path,
    evidence: tuple[Path, Path] | None,
    statement_: Path | None,
    copy: tuple[Path, Path] | None,
) -> None:
    """Check this party's record against all signed heads.

    They are those that this party and its peers have signed.
    A line that was altered, dropped, moved or cut off ends with exit code 2, and one sentence for
    each head that does not fit. So do signed heads that are missing. A record that was rewritten as
    a whole, with its heads, is found by the peers: they hold the old heads, and ask at the next
    run.

    --evidence ends with exit code 0 if PEER has signed two heads that contradict each other: other
    roots of the same lines, fewer lines at a later time, or a proof between them that PEER has
    signed and that does not hold. Otherwise it says "not shown", and ends with exit code 2.
    """
    from vfl_party.disclosures.statement import open_statement
    from vfl_party.record.evidence import verify_evidence as shown
    from vfl_party.record.verify import verify as look

    files = _files(party)
    credentials = files.keyring.current()
    if evidence is not None:
        click.echo(shown(evidence[1], str(evidence[0]), credentials))
        return
    if statement_ is not None:
        document, by = open_statement(statement_, credentials)
        click.echo(f"{statement_}: {by} has signed it, for run {document['predicate']['run']}")
        return
    folder, owner = (copy[1], str(copy[0])) if copy is not None else (_folder(files), files.name)
    check = look(folder, credentials, owner)
    click.echo(f"{count(check.lines, 'line')}, {count(check.heads, 'signed head')}")
    for name, lines in check.signers.items():
        click.echo(f"{name} has signed the first {count(lines, 'line')}")
    if check.covered < check.lines:
        click.echo(f"not signed yet: the last {count(check.lines - check.covered, 'line')}")
    for name, records in check.records.items():
        listing = ", ".join(records)
        click.echo(f"{name} has shown {len(records)} records, not one: {listing}; ask it why")
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
    """Copy the record without its key, for an auditor.

    OUT is a new folder. The copy has the lines and the signed heads, which verify --copy checks at
    any party of the federation. Nobody can look a person up in it: that takes the key,
    people.secret.
    """
    from vfl_party.record.verify import copy as copied

    folder = _folder(_files(party))
    copied(folder, out)
    click.echo(f"{out}: a copy of {folder} without its key")


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def export(party: Path, run: str, out: Path) -> None:
    """Sign a statement of what left in a training run.

    RUN is the id of a run, or latest, or production (see vfl models). OUT is the file to write.

    It is a Statement of in-toto in an envelope of DSSE, signed with the key of the party's
    certificate. Its subject is the party's newest checkpoint of the run. It has no ids, and no
    numbers of rows. Nothing is signed if the record is not as it was signed.
    """
    from vfl_common.files import PLAIN_NAME, write_atomic
    from vfl_party.disclosures.statement import seal, statement
    from vfl_party.record.verify import require

    files = _files(party)
    run = _run_meant(files, run)
    folder = Path(files.file.out) / run / files.name
    if not PLAIN_NAME.fullmatch(run):
        raise InputError(
            Code.CONFIG_INVALID,
            f"RUN: is not the id of a run (got {run!r}). Choose one that `vfl models` lists.",
        )
    facts = _facts(folder)
    require(_folder(files), files.keyring.current())
    document = statement(_folder(files), folder, files.name, facts)
    write_atomic(out, to_json(seal(document, files.keyring.current())) + "\n")
    click.echo(f"{out}: {len(document['predicate']['left'])} exchanges, signed by {files.name}")


@disclosures.command(epilog=EXIT_CODES)
@_PARTY
@click.argument("peer")
def accept(party: Path, peer: str) -> None:
    """Accept the next head of PEER's record, whatever it is.

    Do this only if you know why the peer has a new record, such as a disk that it has lost. The
    previous heads stay in a file in the same folder: they are the evidence.
    """
    from vfl_party.record.heads import accept as set_aside

    files = _files(party)
    aside = set_aside(_folder(files), peer)
    click.echo(f"the next head of {peer} is taken; what it signed before is in {aside}")


def _files(party: Path) -> PartyFiles:
    from vfl_party.assembly.files import read_files

    return read_files(party)


def _run_meant(files: PartyFiles, run: str) -> str:
    from vfl_common.production.registry import WORDS, ModelRegistry

    if run not in WORDS:
        return run
    return ModelRegistry(Path(files.file.out), files.name).find(run, files.recipe.name)


def _folder(files: PartyFiles) -> Path:
    from vfl_party.record.book import folder_of

    return folder_of(Path(files.file.record.folder or files.file.out), files.name)


def _spellings(files: PartyFiles, cells: tuple[str, ...]) -> list[str]:
    """Returns the id as runs may have spelt it: by the rules of the recipe, and of the runs whose
    folders are there.
    """
    from vfl_common.errors import VflError
    from vfl_common.run_folder import RunFolder
    from vfl_party.production.forget import person

    who = person(cells, files.data)
    spellings = [who.normalise_id(None), who.normalise_id(files.recipe)]
    for path in Path(files.file.out).glob(f"*/{files.name}/run.json"):
        try:
            spellings.append(
                who.normalise_id(RunFolder(path.parent, path.parent.parent.name).recipe())
            )
        except VflError:
            continue
    return [*dict.fromkeys(spelling for spelling in spellings if spelling is not None)]


def _facts(folder: Path) -> dict[str, object]:
    from vfl_common.run_folder import RunFolder

    facts = RunFolder(folder, folder.parent.name).facts()
    return {"recipe": facts.get("recipe_digest", ""), "plugins": facts.get("plugins", {})}
