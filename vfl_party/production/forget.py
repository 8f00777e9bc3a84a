"""Finds what a party's folders of runs contain about one person, removes what can be removed, and
reports which models were trained with the row.

The scores of test rows are removed. A checkpoint contains no id; its weights have learned from the
row and do not forget it. Metrics and the digest of the rows stay, because resuming the run and its
summary depend on them.
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

from vfl_common.config.data import DataSettings, get_unaligned_settings, ids_only
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.passwords import hide_passwords
from vfl_common.production import scorings
from vfl_common.run_folder import RunFolder
from vfl_party.align import AlignmentContext, alignment_of
from vfl_party.assembly.party import TRAINING, open_party
from vfl_party.data.ids import SEPARATOR, Ids, normalize_ids
from vfl_party.data.load import read_rows
from vfl_party.outbound.exchange import Connections
from vfl_party.predict.prediction import encoder_of
from vfl_party.predict.results import KEPT, MATCHED, id_names, write_table
from vfl_party.production.input_drift import read_scores
from vfl_party.record.history import RecordHistory

# Number of bytes of a file that are searched at once.
_CHUNK = 1 << 20
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Part = Literal["training", "validation", "test", "alone", "none", "among", "unknown"]
_ADVICE: dict[Part, str] = {
    "training": "was trained with the row. Train again without it.",
    "validation": "was not trained with the row, which was for validation; validation rows may "
    "have chosen the threshold and the end of training. Train again without it to undo that.",
    "test": "was not trained with the row, which was for test",
    "alone": "has seen the row only if a phase learns from rows that not all parties have, as "
    "pretraining does. Train again without it in that case.",
    "none": "was not trained with the row",
    "among": "had the row for training, validation or test, by its record; the table has changed "
    "since training, so the purpose is unknown. Train again without it.",
    "unknown": "may have been trained with the row: the table has changed since training, and no "
    "record here lists the rows of this run",
}


@dataclass(frozen=True)
class FileWithId:
    """A file that contains the id. ``stays``: why it is kept; '' if its rows are removed."""

    path: Path
    what: str
    stays: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {f'stays: {self.stays}' if self.stays else 'removed'}"


@dataclass(frozen=True)
class Trace:
    """The traces of the person in one run.

    ``part``: the purpose of the row; ``start``: the run from which this one has started;
    ``lacks_it``: the name of the party's table if it has no such id, otherwise ''.
    """

    run: str
    part: Part
    held: tuple[FileWithId, ...]
    start: str = ""
    lacks_it: str = ""

    @property
    def has_row(self) -> bool:
        """Whether the run's own predictions have the row; equal text elsewhere may mean others."""
        return any(not file.stays for file in self.held)

    @property
    def verdict(self) -> str:
        """A sentence on whether the model must be trained again."""
        if self.lacks_it and self.part == "none" and not self.has_row:
            return (
                f"{self.run}: {absent(self.lacks_it)}, and this run does not know it. Check the "
                "spelling."
            )
        advice = f"{self.run}: {_ADVICE[self.part]}"
        return f"{advice} (started from {self.start}: see that run)" if self.start else advice


@dataclass(frozen=True)
class Person:
    """The id of one person.

    ``own``: its cells as the party's table spells them, one for each id column; ``settings``: those
    of that table; ``tables``: the id columns of the table and of other files that the settings
    name; None if they cannot be read. ``record``: the folder of the party's record; None without.
    """

    own: tuple[str, ...]
    settings: DataSettings
    tables: tuple[tuple[Any, ...], ...] | None
    record: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the id columns."""
        return id_names(self.settings)

    def rules(self, recipe: Recipe | None) -> tuple[str, ...]:
        """Returns the id rules of a run; without a recipe, those of the party file."""
        settings = self.settings.with_id_rules(
            () if recipe is None else tuple(recipe.rows.id_rules)
        )
        return settings.id_rules or ()

    def normalise_id(self, recipe: Recipe | None) -> str | None:
        """Returns the id as the parties spell it in a run; None if its rules reject it."""
        spelling: str | None = normalize_ids([[cell] for cell in self.own], self.rules(recipe))[
            0
        ].as_py()
        return spelling

    def among(self, columns: Sequence[Any], recipe: Recipe | None) -> Mask:
        """Returns for each row whether it is the person's: by equal cells, or by the id rules.

        ``columns``: the id columns, [N] cells each. Returns a mask, [N].
        """
        texts = [pa.compute.cast(_whole(column), pa.large_string()) for column in columns]
        here = np.ones(len(texts[0]), bool)
        for cell, column in zip(self.own, texts, strict=True):
            here &= _equal(column, cell)
        matched = self.normalise_id(recipe)
        if matched is not None:
            here |= _equal(normalize_ids(texts, self.rules(recipe)), matched)
        return here

    def in_table(self, recipe: Recipe | None) -> bool:
        """Whether the party's table has the id, as far as it can be read."""
        return self.tables is None or any(
            bool(self.among(columns, recipe).any()) for columns in self.tables
        )


def absent(source: str) -> str:
    """Returns a clause: the table has no such id."""
    return f"no row of {source} has this id"


def person(cells: Sequence[str], settings: DataSettings, record: Path | None = None) -> Person:
    """Returns the person with an id.

    ``record``: as in ``Person``. Raises InputError if the number of cells is not that of the id
    columns of the table, or if the id is not UTF-8 text.
    """
    names = id_names(settings)
    if len(cells) != len(names):
        raise InputError(
            Code.CONFIG_INVALID,
            f"id: must have {len(names)} {'cell' if len(names) == 1 else 'cells'} "
            f"(got {len(cells)}). Give one for each of {', '.join(names)}.",
        )
    try:
        # A command line can have bytes that are not text.
        "".join(cells).encode()
    except UnicodeEncodeError:
        raise InputError(
            Code.CONFIG_INVALID, "id: must be UTF-8 text. Type it again in a UTF-8 terminal."
        ) from None
    return Person(tuple(cells), settings, _ids_of(settings), record)


def _ids_of(settings: DataSettings) -> tuple[tuple[Any, ...], ...] | None:
    """Reads the ids of all rows of a party, also of those that a run leaves out."""
    more = get_unaligned_settings(settings)
    tables = [*(settings.parts.values() or [settings]), *([] if more is None else [more])]
    try:
        return tuple(tuple(read_rows(ids_only(table), False).ids) for table in tables)
    except InputError:
        # A table has changed, or is gone.
        return None


def trace(folder: RunFolder, name: str, who: Person, *, remove: bool) -> Trace:
    """Returns what a party's folder of a run has about the person; ``remove``: also remove it.

    Raises InputError if the folder cannot be read or written, or if another process uses it.
    """
    if remove:
        folder.lock()
    try:
        recipe = folder.recipe()
        part = _part(folder, recipe, name, who)
        held = [
            *_drop_scores(folder.path / KEPT, who, recipe, remove=remove),
            *_elsewhere(folder.path, who, recipe),
        ]
    finally:
        folder.unlock()
    start = "" if recipe.start is None else recipe.start.run
    lacks_it = "" if who.in_table(recipe) else hide_passwords(who.settings.source)
    return Trace(folder.run_id, part, tuple(held), start, lacks_it)


def outputs(out: Path, name: str, who: Person) -> list[FileWithId]:
    """Returns the files of scores that contain the id, by the log of predictions.

    They are not changed, because they belong to the users who asked for them. Raises InputError if
    the log cannot be read.
    """
    by_output = {line.output: line for line in scorings.read(out) if line.party == name}
    held = []
    for output, scoring in by_output.items():
        path = Path(output)
        if not output or not path.is_file():
            continue
        try:
            table = read_scores(path)
            if any(name not in table.column_names for name in who.names):
                raise InputError(
                    Code.FILE_INVALID, f"{path}: has different id columns. Check this file."
                )
        except InputError:
            held.append(FileWithId(path, "cannot be read", "check it yourself"))
            continue
        if _rows(table, who, _recipe_of(out / scoring.model / name, scoring.model)).any():
            what = f"contains the row, which {scoring.who} scored at {scoring.at}"
            held.append(FileWithId(path, what, "remove the row there and from all copies"))
    return held


def _part(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    """Returns the purpose of the row: by the party's table if it is that of training, otherwise by
    the run's own predictions, otherwise by the party's record.
    """
    try:
        part = _by_table(folder, recipe, name, who)
    except (VflError, KeyError):
        # The table has changed, or is gone.
        part = "unknown"
    path = folder.path / KEPT
    if part == "unknown" and path.exists():
        table = read_scores(path)
        splits = table.filter(pa.array(_rows(table, who, recipe))).column("split").to_pylist()
        if splits:
            if any(split.startswith("train") for split in splits):
                return "training"
            return "validation" if "validation" in splits else "test"
    return _by_record(folder, recipe, who) if part == "unknown" else part


def _by_record(folder: RunFolder, recipe: Recipe, who: Person) -> Part:
    """Returns whether the record lists the person among the rows of a run."""
    matched = who.normalise_id(recipe)
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
    # A stored alignment needs no peers.
    nobody = cast(Connections, None)
    at = AlignmentContext(name, folder.run_id, opened.table, folder.path, nobody)
    aligned = alignment_of(recipe).get_agreed(at)
    prepared = TRAINING.prepare(opened, aligned)
    if prepared.fingerprint != folder.facts().get("data"):
        return "unknown"
    matched = who.normalise_id(recipe)
    if matched is None:
        return "none"
    rows = np.flatnonzero(Ids.of(prepared.table.ids).among([matched]))
    if not len(rows):
        rest = opened.unaligned
        tables = [opened.table] if rest is None else [opened.table, rest]
        alone = any(Ids.of(table.ids).among([matched]).any() for table in tables)
        return "alone" if alone else "none"
    if rows[0] in prepared.splits["validation"]:
        return "validation"
    return "test" if rows[0] in prepared.splits["test"] else "training"


def _drop_scores(path: Path, who: Person, recipe: Recipe, *, remove: bool) -> Iterator[FileWithId]:
    """Yields the run's own predictions if they have the row; ``remove``: also remove it there."""
    if not path.exists():
        return
    table = read_scores(path)
    here = _rows(table, who, recipe)
    if here.any():
        if remove:
            write_table(path, table.filter(pa.array(~here)))
        count = int(here.sum())
        yield FileWithId(
            path, f"{count:,} {'row' if count == 1 else 'rows'} with id, label and score"
        )


def _elsewhere(folder: Path, who: Person, recipe: Recipe) -> Iterator[FileWithId]:
    """Yields other files that contain a cell of the id as quoted text, as in JSON."""
    matched = who.normalise_id(recipe)
    spelt = who.own if matched is None else tuple(matched.split(SEPARATOR))
    wanted = [[json.dumps(cell).encode() for cell in cells] for cells in {who.own, spelt}]
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        if path.name != KEPT and any(all(_holds(path, t) for t in cells) for cells in wanted):
            yield FileWithId(
                path,
                "contains a text that equals the id",
                "the model uses it as a category or a name, and cannot be loaded without it",
            )


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
    """Returns for each row of a result whether it is the person's: by the id of the party's own
    table, or by that of entity alignment. The mask is [N].
    """
    here = np.zeros(table.num_rows, bool)
    for names in (who.names, [f"{MATCHED}{name}" for name in who.names]):
        if all(name in table.column_names for name in names):
            here |= who.among([table.column(name) for name in names], recipe)
    return here


def _equal(column: Any, text: str) -> Mask:
    mask: Mask = pa.compute.fill_null(pa.compute.equal(column, text), False).to_numpy(False)
    return mask


def _whole(column: Any) -> Any:
    """Returns a column of text as one Arrow array."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column if isinstance(column, pa.Array) else pa.array(column, pa.large_string())
