"""Finds what a party's folders of runs contain about one person, removes what can be removed, and
reports which models were trained with the row.

The scores of test rows are removed, and the person's line in the sample of a fuzzy linkage. A
checkpoint contains no id; its weights have learned from the row and do not forget it. Metrics and
the digest of the rows stay, because resuming the run and its summary depend on them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from vfl_common import scorings
from vfl_common.config.data import DataSettings, get_unaligned_settings, without_features
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import private_file
from vfl_common.run_folder import RunFolder
from vfl_common.text import hide_passwords
from vfl_party.align import AlignmentContext, make_alignment
from vfl_party.align.state import FOLDER
from vfl_party.assembly.party import TRAINING, open_party
from vfl_party.data.id_rules import SEPARATOR, spell_ids, split_keys
from vfl_party.data.ids import Ids
from vfl_party.data.load import read_rows
from vfl_party.outbound.exchange import Connections
from vfl_party.predict.input_drift import read_scores
from vfl_party.predict.results import KEPT, MATCHED, id_names, write_table
from vfl_party.predict.run import encoder_of
from vfl_party.record.history import RecordHistory

# The sample of links for a review, which ``vfl_party.align.fuzzy`` writes.
SAMPLE = f"{FOLDER}/sample.csv"
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
    """A file that contains the id.

    ``what``: A description of the contents. ``stays``: The reason why the file is not changed, or
    '' if its rows are removed.
    """

    path: Path
    what: str
    stays: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {f'stays: {self.stays}' if self.stays else 'removed'}"


@dataclass(frozen=True)
class Trace:
    """The traces of the person in one run.

    Args:
        run: The id of the run.
        part: The purpose of the row in the run.
        held: The files of the run that contain the id.
        start: The id of the run whose weights this run started from, or ''.
        lacks_it: The name of the party's table if the table does not have the id, otherwise ''.
    """

    run: str
    part: Part
    held: tuple[FileWithId, ...]
    start: str = ""
    lacks_it: str = ""

    @property
    def has_row(self) -> bool:
        """Whether the run's predictions have the row. Equal text in other files may be a
        coincidence.
        """
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

    Args:
        own: The cells of the id in the party's table, one for each id column.
        settings: The settings of this table.
        tables: The id columns of the table and of other files that the settings name, or None if
            they cannot be read.
        record: The folder of the party's record, or None if there is no record.
    """

    own: tuple[str, ...]
    settings: DataSettings
    tables: tuple[tuple[Any, ...], ...] | None
    record: Path | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the id columns."""
        return id_names(self.settings)

    def spelling(self, recipe: Recipe | None) -> DataSettings:
        """Returns the settings with the id rules and keys of a run, if there is a recipe."""
        return self.settings if recipe is None else self.settings.with_id_rules(recipe.rows)

    def normalise_id(self, recipe: Recipe | None) -> str | None:
        """Returns the normalised id in a run, or None if the id rules reject the id."""
        normalised: str | None = spell_ids(
            [[cell or None] for cell in self.own], self.spelling(recipe)
        )[0].as_py()
        return normalised

    def among(self, columns: Sequence[Any], recipe: Recipe | None) -> Mask:
        """Returns a bool mask [N] of the rows that belong to the person.

        A row belongs to the person if its cells or its normalised id are equal. ``columns``: The id
        columns with N cells each.
        """
        texts = [pa.compute.cast(_to_array(column), pa.large_string()) for column in columns]
        mask = np.ones(len(texts[0]), bool)
        for cell, column in zip(self.own, texts, strict=True):
            mask &= _match_text(column, cell)
        return mask | self.match_ids(spell_ids(texts, self.spelling(recipe)), recipe)

    def match_ids(self, ids: pa.LargeStringArray, recipe: Recipe | None) -> Mask:
        """Returns a bool mask [N] of the normalised ids that are the person's. With the keys of a
        recipe, one equal key is enough.
        """
        matched, keys = self.normalise_id(recipe), self.spelling(recipe).key_columns
        if matched is None:
            return np.zeros(len(ids), bool)
        if keys is None or (recipe is not None and not recipe.rows.keys):
            return _match_text(ids, matched)
        mask = np.zeros(len(ids), bool)
        own = split_keys(pa.array([matched], pa.large_string()), keys)
        for key, column in zip(own, split_keys(ids, keys), strict=True):
            if key[0].is_valid:
                mask |= _match_text(column, key[0].as_py())
        return mask

    def in_table(self, recipe: Recipe | None) -> bool:
        """Returns whether the party's table has the id, or True if the table cannot be read."""
        return self.tables is None or any(
            bool(self.among(columns, recipe).any()) for columns in self.tables
        )


def absent(source: str) -> str:
    """Returns the clause that a table does not have the id."""
    return f"no row of {source} has this id"


def person(cells: Sequence[str], settings: DataSettings, record: Path | None = None) -> Person:
    """Returns the person with the id ``cells``.

    ``record``: The folder of the party's record. Raises InputError if the number of cells differs
    from the number of id columns, or if the id is not UTF-8 text.
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
    return Person(tuple(cells), settings, _read_ids(settings), record)


def _read_ids(settings: DataSettings) -> tuple[tuple[Any, ...], ...] | None:
    """Reads the ids of all rows of a party, including rows that a run leaves out.

    Returns None if a table cannot be read.
    """
    more = get_unaligned_settings(settings)
    tables = [*(settings.parts.values() or [settings]), *([] if more is None else [more])]
    try:
        return tuple(tuple(read_rows(without_features(table), False).ids) for table in tables)
    except InputError:
        # A table has changed or does not exist any more.
        return None


def trace(folder: RunFolder, name: str, who: Person, *, remove: bool) -> Trace:
    """Finds the traces of a person in a party's folder of a run.

    With ``remove`` it also removes the rows that can be removed. Raises InputError if the folder
    cannot be read or written, or if another process uses it.
    """
    if remove:
        folder.lock()
    try:
        recipe = folder.recipe()
        part = _find_purpose(folder, recipe, name, who)
        held = [
            *_drop_scores(folder.path / KEPT, who, recipe, remove=remove),
            *_drop_sample(folder.path / SAMPLE, who, recipe, remove=remove),
            *_find_other_files(folder.path, who, recipe),
        ]
    finally:
        folder.unlock()
    start = "" if recipe.start is None else recipe.start.run
    lacks_it = "" if who.in_table(recipe) else hide_passwords(who.settings.source)
    return Trace(folder.run_id, part, tuple(held), start, lacks_it)


def clear_sample(folder: RunFolder, who: Person, *, remove: bool) -> list[FileWithId]:
    """Finds a person in the sample of the fuzzy linkage of a joint prediction.

    With ``remove`` it also removes the person's line. Raises the errors of ``trace``.
    """
    if remove:
        folder.lock()
    try:
        return [*_drop_sample(folder.path / SAMPLE, who, folder.recipe(), remove=remove)]
    finally:
        folder.unlock()


def outputs(out: Path, name: str, who: Person) -> list[FileWithId]:
    """Returns the files of scores that contain the id, according to the log of predictions.

    These files are not changed, because they belong to the users who requested the predictions.
    Raises InputError if the log cannot be read.
    """
    by_output = {line.output: line for line in scorings.read(out) if line.party == name}
    files = []
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
            files.append(FileWithId(path, "cannot be read", "check it yourself"))
            continue
        if _find_rows(table, who, _read_recipe(out / scoring.model / name, scoring.model)).any():
            what = f"contains the row, which {scoring.who} scored at {scoring.at}"
            files.append(FileWithId(path, what, "remove the row there and from all copies"))
    return files


def _find_purpose(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    """Returns the purpose of the row in a run.

    It is taken from the party's table if the table has not changed since training, otherwise from
    the run's predictions, and otherwise from the party's record.
    """
    try:
        part = _find_purpose_by_table(folder, recipe, name, who)
    except (VflError, KeyError):
        # The table has changed or does not exist any more.
        part = "unknown"
    path = folder.path / KEPT
    if part == "unknown" and path.exists():
        table = read_scores(path)
        splits = table.filter(pa.array(_find_rows(table, who, recipe))).column("split").to_pylist()
        if splits:
            if any(split.startswith("train") for split in splits):
                return "training"
            return "validation" if "validation" in splits else "test"
    return _find_purpose_by_record(folder, recipe, who) if part == "unknown" else part


def _find_purpose_by_record(folder: RunFolder, recipe: Recipe, who: Person) -> Part:
    """Returns ``among`` or ``none``, depending on whether the record lists the person in a run."""
    matched = who.normalise_id(recipe)
    if who.record is None or matched is None:
        return "unknown"
    try:
        is_listed = RecordHistory(who.record).runs_with([matched]).get(folder.run_id)
    except InputError:
        # The party keeps no record, or it is damaged.
        return "unknown"
    if is_listed is None or (recipe.rows.matching_columns and not is_listed):
        # The record lists a person by all columns of the id, and one key may have been corrected.
        return "unknown"
    return "among" if is_listed else "none"


def _find_purpose_by_table(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    opened = open_party(recipe, name, who.settings, encoder_of(folder, recipe, name))
    # A stored alignment needs no peers.
    no_connections = cast(Connections, None)
    at = AlignmentContext(name, folder.run_id, opened.table, folder.path, no_connections)
    aligned = make_alignment(recipe).get_agreed(at)
    prepared = TRAINING.prepare(opened, aligned)
    if prepared.fingerprint != folder.facts().get("data"):
        return "unknown"
    matched = who.normalise_id(recipe)
    if matched is None:
        return "none"
    rows = np.flatnonzero(who.match_ids(Ids.of(prepared.table.ids).values, recipe))
    if not len(rows):
        unaligned = opened.unaligned
        tables = [opened.table] if unaligned is None else [opened.table, unaligned]
        is_unaligned = any(
            who.match_ids(Ids.of(table.ids).values, recipe).any() for table in tables
        )
        return "alone" if is_unaligned else "none"
    # Several rows may have one of the person's keys.
    is_test = np.isin(rows, prepared.splits["test"])
    is_validation = np.isin(rows, prepared.splits["validation"])
    if not np.all(is_test | is_validation):
        return "training"
    return "validation" if is_validation.any() else "test"


def _drop_scores(path: Path, who: Person, recipe: Recipe, *, remove: bool) -> Iterator[FileWithId]:
    """Yields the file of the run's predictions if it has the row, and removes the row if asked."""
    if not path.exists():
        return
    table = read_scores(path)
    mask = _find_rows(table, who, recipe)
    if mask.any():
        if remove:
            write_table(path, table.filter(pa.array(~mask)))
        count = int(mask.sum())
        yield FileWithId(
            path, f"{count:,} {'row' if count == 1 else 'rows'} with id, label and score"
        )


def _drop_sample(path: Path, who: Person, recipe: Recipe, *, remove: bool) -> Iterator[FileWithId]:
    """Yields the sample of a fuzzy linkage if it has the person, and removes the line if asked."""
    if not path.exists():
        return
    try:
        lines = [*csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))]
    except (OSError, ValueError, csv.Error):
        yield FileWithId(path, "cannot be read", "check it yourself")
        return
    matched, keys = who.normalise_id(recipe), who.spelling(recipe).key_columns
    if matched is None or keys is None:
        return
    cells = matched.split(SEPARATOR)
    by_name = {
        name: cells[place]
        for name, (place,) in zip(recipe.rows.fuzzy.fields, keys.keys, strict=True)
    }
    # The first line has the names of the fields.
    fields = [by_name.get(name) for name in lines[0][2:]] if lines else []
    # A line begins with the number of the link and its similarity.
    mask = [line[2:] == fields for line in lines]
    if any(mask):
        if remove:
            text = io.StringIO()
            csv.writer(text).writerows(
                line for line, is_person in zip(lines, mask, strict=True) if not is_person
            )
            with private_file(path) as file:
                file.write(text.getvalue().encode())
        yield FileWithId(path, "a line with the person's fields, for the review of links")


def _find_other_files(folder: Path, who: Person, recipe: Recipe) -> Iterator[FileWithId]:
    """Yields other files of the run that contain the id as quoted text, as in JSON."""
    matched = who.normalise_id(recipe)
    normalised_cells = who.own if matched is None else tuple(matched.split(SEPARATOR))
    quoted_ids = [
        [json.dumps(cell).encode() for cell in cells] for cells in {who.own, normalised_cells}
    ]
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        if path not in (folder / KEPT, folder / SAMPLE) and any(
            all(_contains(path, t) for t in cells) for cells in quoted_ids
        ):
            yield FileWithId(
                path,
                "contains a text that equals the id",
                "the model uses it as a category or a name, and cannot be loaded without it",
            )


def _contains(path: Path, text: bytes) -> bool:
    previous = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if text in previous + chunk:
                return True
            previous = chunk[-len(text) :]
    return False


def _read_recipe(path: Path, run_id: str) -> Recipe | None:
    """Returns the recipe of a run, or None if its folder does not exist any more."""
    try:
        return RunFolder(path, run_id).recipe()
    except InputError:
        return None


def _find_rows(table: pa.Table, who: Person, recipe: Recipe | None) -> Mask:
    """Returns a bool mask [N] of the rows of a result that belong to the person.

    It compares the ids of the party's table and the normalised ids of the entity alignment.
    """
    mask = np.zeros(table.num_rows, bool)
    for names in (who.names, [f"{MATCHED}{name}" for name in who.names]):
        if all(name in table.column_names for name in names):
            mask |= who.among([table.column(name) for name in names], recipe)
    return mask


def _match_text(column: Any, text: str) -> Mask:
    mask: Mask = pa.compute.fill_null(pa.compute.equal(column, text), False).to_numpy(False)
    return mask


def _to_array(column: Any) -> Any:
    """Returns a column of text as one Arrow array."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column if isinstance(column, pa.Array) else pa.array(column, pa.large_string())
