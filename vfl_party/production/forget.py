"""Finds what a party's folders of runs hold of one person, removes what can be removed, and says
which models were trained with the row.

The scores of tested rows are removed. A checkpoint holds no id; its weights have learnt from the
row, and do not forget it. Metrics and the digest of the rows stay, because the run's resumption and
its summary rest on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from vfl_common.config.data import DataSettings, ids_only, shown, unaligned_of
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.production import scorings
from vfl_common.run_folder import RunFolder
from vfl_party.align import Aligning, alignment_of
from vfl_party.assembly.party import TRAINING, open_party
from vfl_party.data.ids import SEPARATOR, Ids, normalised
from vfl_party.data.load import read_rows
from vfl_party.outbound.exchange import Connections
from vfl_party.predict.prediction import encoder_of
from vfl_party.predict.results import KEPT, MATCHED, id_names, write_table
from vfl_party.production.input_drift import read_scores
from vfl_party.record.history import RecordHistory

# Bytes of a file that are searched at once.
_CHUNK = 1 << 20
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Part = Literal["training", "validation", "test", "alone", "none", "among", "unknown"]
_SAID: dict[Part, str] = {
    "training": "was trained with the row: train again without it",
    "validation": "was not trained with the row, which was for validation; validation rows may "
    "have chosen the threshold and the end of training: train again without it to undo that",
    "test": "was not trained with the row, which was for test",
    "alone": "has seen the row only if a phase learns from rows that not all parties hold, as "
    "pretraining does: then train again without it",
    "none": "was not trained with the row",
    "among": "had the row for training, validation or test, as its record says; the table is not "
    "that of training any more, so nobody knows which: train again without it",
    "unknown": "may have been trained with the row: the table is not that of training any more, "
    "and no record here lists the rows of this run",
}


@dataclass(frozen=True)
class Held:
    """A file that holds the id. ``stays``: why it is not changed; '' if its rows are removed."""

    path: Path
    what: str
    stays: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {f'stays: {self.stays}' if self.stays else 'removed'}"


@dataclass(frozen=True)
class Trace:
    """What one run has of the person. ``part``: what the row was for; ``start``: the run from which
    this one has started; ``lacks_it``: the table's name if it has no such id.
    """

    run: str
    part: Part
    held: tuple[Held, ...]
    start: str = ""
    lacks_it: str = ""

    @property
    def has_row(self) -> bool:
        """Whether the run's own predictions have the row: a text that is equal may be another's."""
        return any(not each.stays for each in self.held)

    @property
    def said(self) -> str:
        """Whether the model must be trained again, in one sentence."""
        since = f"; it has started from {self.start}: see that run" if self.start else ""
        if self.lacks_it and self.part == "none" and not self.has_row:
            return (
                f"{self.run}: {absent(self.lacks_it)}, and this run knows none; check its spelling"
            )
        return f"{self.run}: {_SAID[self.part]}{since}"


@dataclass(frozen=True)
class Person:
    """One id. ``own``: its cells as the party's table writes them, one for each id column;
    ``settings``: of that table; ``tables``: the columns of ids of it, and of other files that it
    names; None if they cannot be read. ``record``: the folder of the party's record; None without.
    """

    own: tuple[str, ...]
    settings: DataSettings
    tables: tuple[tuple[Any, ...], ...] | None
    record: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return id_names(self.settings)

    def rules(self, recipe: Recipe | None) -> tuple[str, ...]:
        """Returns the rules of ids in a run; without it, those of the party file."""
        settings = self.settings.ruled(() if recipe is None else tuple(recipe.rows.id_rules))
        return settings.id_rules or ()

    def matched(self, recipe: Recipe | None) -> str | None:
        """Returns the id as the parties have spelt it in a run; None if it is none by its rules."""
        found: str | None = normalised([[cell] for cell in self.own], self.rules(recipe))[0].as_py()
        return found

    def among(self, columns: Sequence[Any], recipe: Recipe | None) -> Mask:
        """Returns for each row of some columns of ids whether it is the person's: by the same
        cells, or by the rules.
        """
        texts = [pa.compute.cast(_whole(column), pa.large_string()) for column in columns]
        here = np.ones(len(texts[0]), bool)
        for cell, column in zip(self.own, texts, strict=True):
            here &= _equal(column, cell)
        matched = self.matched(recipe)
        if matched is not None:
            here |= _equal(normalised(texts, self.rules(recipe)), matched)
        return here

    def in_table(self, recipe: Recipe | None) -> bool:
        """Whether the party's table has the id, as far as it can be read."""
        return self.tables is None or any(
            bool(self.among(columns, recipe).any()) for columns in self.tables
        )


def absent(source: str) -> str:
    """Says that a table has no such id."""
    return f"no row of {source} has this id"


def person(cells: Sequence[str], settings: DataSettings, record: Path | None = None) -> Person:
    """Returns the person with an id. ``record``: as in ``Person``. Raises InputError if the id has
    not as many cells as the table has id columns, or is not UTF-8 text.
    """
    names = id_names(settings)
    if len(cells) != len(names):
        text = f"the id has {len(names)} columns ({', '.join(names)})"
        raise InputError(Code.CONFIG_INVALID, f"{text}, and {len(cells)} are given")
    try:
        # A command line can have bytes that are no text.
        "".join(cells).encode()
    except UnicodeEncodeError:
        raise InputError(Code.CONFIG_INVALID, "the id is no text in UTF-8; write it anew") from None
    return Person(tuple(cells), settings, _ids_of(settings), record)


def _ids_of(settings: DataSettings) -> tuple[tuple[Any, ...], ...] | None:
    """Reads the ids of a party's rows, also of those that a run leaves out."""
    more = unaligned_of(settings)
    tables = [*(settings.parts.values() or [settings]), *([] if more is None else [more])]
    try:
        return tuple(tuple(read_rows(ids_only(each), False).ids) for each in tables)
    except InputError:
        # One has changed, or is gone.
        return None


def trace(folder: RunFolder, name: str, who: Person, *, remove: bool) -> Trace:
    """Returns what a party's folder of a run has of the person; ``remove``: removes what can be.

    Raises InputError if the folder cannot be read or written, or if another process has it.
    """
    if remove:
        folder.lock()
    try:
        recipe = folder.recipe()
        part = _part(folder, recipe, name, who)
        held = [
            *_kept(folder.path / KEPT, who, recipe, remove=remove),
            *_elsewhere(folder.path, who, recipe),
        ]
    finally:
        folder.unlock()
    start = "" if recipe.start is None else recipe.start.run
    lacks_it = "" if who.in_table(recipe) else shown(who.settings.source)
    return Trace(folder.run_id, part, tuple(held), start, lacks_it)


def outputs(out: Path, name: str, who: Person) -> list[Held]:
    """Returns the files of predictions that hold the id, by the log of predictions. They are not
    changed: they belong to who asked for them. Raises InputError if the log cannot be read.
    """
    found = {each.output: each for each in scorings.read(out) if each.party == name}
    held = []
    for output, each in found.items():
        path = Path(output)
        if not output or not path.is_file():
            continue
        try:
            table = read_scores(path)
            if any(each not in table.column_names for each in who.names):
                raise InputError(Code.FILE_INVALID, "its columns of ids have other names")
        except InputError:
            held.append(Held(path, "cannot be read", "look into it yourself"))
            continue
        if _rows(table, who, _recipe_of(out / each.model / name, each.model)).any():
            what = f"holds the row; {each.who} asked for it at {each.at}"
            held.append(Held(path, what, "remove the row there, and where it was copied to"))
    return held


def _part(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    """Returns what the row was for: by the party's table if it is that of training, else by the
    run's own predictions, else by the party's record.
    """
    try:
        found = _by_table(folder, recipe, name, who)
    except (VflError, KeyError):
        # The table has changed, or is gone.
        found = "unknown"
    path = folder.path / KEPT
    if found == "unknown" and path.exists():
        table = read_scores(path)
        splits = table.filter(pa.array(_rows(table, who, recipe))).column("split").to_pylist()
        if splits:
            if any(each.startswith("train") for each in splits):
                return "training"
            return "validation" if "validation" in splits else "test"
    return _by_record(folder, recipe, who) if found == "unknown" else found


def _by_record(folder: RunFolder, recipe: Recipe, who: Person) -> Part:
    """Returns whether the record lists the person among the rows of a run."""
    matched = who.matched(recipe)
    if who.record is None or matched is None:
        return "unknown"
    try:
        has = RecordHistory(who.record).runs_with([matched]).get(folder.run_id)
    except InputError:
        # The party keeps no record, or it is damaged.
        return "unknown"
    return "unknown" if has is None else "among" if has else "none"


def _by_table(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    opened = open_party(recipe, name, who.settings, encoder_of(folder, recipe, name))
    # What was agreed on before needs nobody.
    nobody = cast(Connections, None)
    at = Aligning(name, folder.run_id, opened.table, folder.path, nobody)
    aligned = alignment_of(recipe).kept(at)
    prepared = TRAINING.prepare(opened, aligned)
    if prepared.fingerprint != folder.facts().get("data"):
        return "unknown"
    matched = who.matched(recipe)
    if matched is None:
        return "none"
    rows = np.flatnonzero(Ids.of(prepared.table.ids).among([matched]))
    if not len(rows):
        rest = opened.unaligned
        tables = [opened.table] if rest is None else [opened.table, rest]
        alone = any(Ids.of(each.ids).among([matched]).any() for each in tables)
        return "alone" if alone else "none"
    if rows[0] in prepared.splits["validation"]:
        return "validation"
    return "test" if rows[0] in prepared.splits["test"] else "training"


def _kept(path: Path, who: Person, recipe: Recipe, *, remove: bool) -> Iterator[Held]:
    """Yields the run's own predictions if they hold the row, without it if it is removed."""
    if not path.exists():
        return
    table = read_scores(path)
    here = _rows(table, who, recipe)
    if here.any():
        if remove:
            write_table(path, table.filter(pa.array(~here)))
        rows = f"{int(here.sum()):,} rows with id, label and score"
        yield Held(path, rows)


def _elsewhere(folder: Path, who: Person, recipe: Recipe) -> Iterator[Held]:
    """Yields other files in which a cell of the id stands as text in quotes, as in JSON."""
    matched = who.matched(recipe)
    spelt = who.own if matched is None else tuple(matched.split(SEPARATOR))
    wanted = [[json.dumps(cell).encode() for cell in cells] for cells in {who.own, spelt}]
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        if path.name != KEPT and any(all(_holds(path, t) for t in each) for each in wanted):
            why = "the model was made with it, as a category or a name, and cannot be read without"
            yield Held(path, "holds a text that is equal to the id", why)


def _holds(path: Path, text: bytes) -> bool:
    before = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if text in before + chunk:
                return True
            before = chunk[-len(text) :]
    return False


def _recipe_of(path: Path, run_id: str) -> Recipe | None:
    """Returns the recipe of a run whose folder may be gone."""
    try:
        return RunFolder(path, run_id).recipe()
    except InputError:
        return None


def _rows(table: pa.Table, who: Person, recipe: Recipe | None) -> Mask:
    """Returns for each row of a result whether it is the person's: by the id as their own table has
    it, or as the parties have matched it.
    """
    here = np.zeros(table.num_rows, bool)
    for names in (who.names, [f"{MATCHED}{name}" for name in who.names]):
        if all(name in table.column_names for name in names):
            here |= who.among([table.column(name) for name in names], recipe)
    return here


def _equal(column: Any, text: str) -> Mask:
    found: Mask = pa.compute.fill_null(pa.compute.equal(column, text), False).to_numpy(False)
    return found


def _whole(column: Any) -> Any:
    """Returns a column of text as one Arrow array."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column if isinstance(column, pa.Array) else pa.array(column, pa.large_string())
