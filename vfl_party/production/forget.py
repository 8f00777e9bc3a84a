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
from typing import Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.production import scorings
from vfl_common.run_folder import RunFolder
from vfl_party.align import Aligning, alignment_of
from vfl_party.assembly.party import TRAINING, open_party
from vfl_party.data.ids import Ids, normalised
from vfl_party.outbound.exchange import Connections
from vfl_party.predict.prediction import encoder_of
from vfl_party.predict.results import KEPT, id_names, write_table
from vfl_party.production.input_drift import read_scores

# Bytes of a file that are searched at once.
_CHUNK = 1 << 20
Part = Literal["training", "tested", "alone", "none", "unknown"]
_SAID: dict[Part, str] = {
    "training": "was trained with the row: train again without it",
    "tested": "was not trained with the row, which was for validation or test",
    "alone": "has seen the row only if a phase learns from rows that not all parties hold, as "
    "pretraining does: then train again without it",
    "none": "was not trained with the row",
    "unknown": "may have been trained with the row: the table is not that of training any more, "
    "and a run keeps no ids of training rows",
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
    this one has started.
    """

    run: str
    part: Part
    held: tuple[Held, ...]
    start: str = ""

    @property
    def said(self) -> str:
        """Whether the model must be trained again, in one sentence."""
        since = f"; it has started from {self.start}: see that run" if self.start else ""
        return f"{self.run}: {_SAID[self.part]}{since}"


@dataclass(frozen=True)
class Person:
    """One id. ``own``: its cells as the party's table writes them, one for each id column;
    ``settings``: of that table.
    """

    own: tuple[str, ...]
    settings: DataSettings

    @property
    def names(self) -> tuple[str, ...]:
        return id_names(self.settings)

    def matched(self, recipe: Recipe) -> str:
        """Returns the id as the parties have spelt it in a run."""
        rules = self.settings.ruled(recipe.rows.id_rules).id_rules or ()
        return Ids(normalised([[cell] for cell in self.own], rules))[0]


def person(cells: Sequence[str], settings: DataSettings) -> Person:
    """Returns the person with an id. Raises InputError if it has not as many cells as the table has
    id columns.
    """
    found = Person(tuple(cells), settings)
    if len(found.own) != len(found.names):
        text = f"the id has {len(found.names)} columns ({', '.join(found.names)})"
        raise InputError(Code.CONFIG_INVALID, f"{text}, and {len(found.own)} are given")
    return found


def trace(folder: RunFolder, name: str, who: Person, *, remove: bool) -> Trace:
    """Returns what a party's folder of a run has of the person; ``remove``: removes what can be.

    Raises InputError if the folder cannot be read or written, or if another process has it.
    """
    if remove:
        folder.lock()
    try:
        recipe = folder.recipe()
        part = _part(folder, recipe, name, who)
        held = [*_kept(folder.path / KEPT, who, remove=remove), *_elsewhere(folder.path, who)]
    finally:
        folder.unlock()
    return Trace(folder.run_id, part, tuple(held), "" if recipe.start is None else recipe.start.run)


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
        if _rows(table, who).any():
            what = f"holds the row; {each.who} asked for it at {each.at}"
            held.append(Held(path, what, "remove the row there, and where it was copied to"))
    return held


def _part(folder: RunFolder, recipe: Recipe, name: str, who: Person) -> Part:
    """Returns what the row was for: by the party's table if it is that of training, else by the
    run's own predictions.
    """
    try:
        found = _by_table(folder, recipe, name, who)
    except (VflError, KeyError):
        # The table has changed, or is gone.
        found = "unknown"
    path = folder.path / KEPT
    if found == "unknown" and path.exists():
        table = read_scores(path)
        splits = table.filter(pa.array(_rows(table, who))).column("split").to_pylist()
        if splits:
            return "training" if any(each.startswith("train") for each in splits) else "tested"
    return found


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
    rows = np.flatnonzero(Ids.of(prepared.table.ids).among([matched]))
    if not len(rows):
        rest = opened.unaligned
        tables = [opened.table] if rest is None else [opened.table, rest]
        alone = any(Ids.of(each.ids).among([matched]).any() for each in tables)
        return "alone" if alone else "none"
    tested = [split for split in ("validation", "test") if rows[0] in prepared.splits[split]]
    return "tested" if tested else "training"


def _kept(path: Path, who: Person, *, remove: bool) -> Iterator[Held]:
    """Yields the run's own predictions if they hold the row, without it if it is removed."""
    if not path.exists():
        return
    table = read_scores(path)
    here = _rows(table, who)
    if here.any():
        if remove:
            write_table(path, table.filter(pa.array(~here)))
        rows = f"{int(here.sum()):,} rows with id, label and score"
        yield Held(path, rows)


def _elsewhere(folder: Path, who: Person) -> Iterator[Held]:
    """Yields other files in which a cell of the id stands as text in quotes, as in JSON."""
    wanted = [json.dumps(cell).encode() for cell in who.own]
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        if path.name != KEPT and all(_holds(path, text) for text in wanted):
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


def _rows(table: pa.Table, who: Person) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns for each row of a result whether it is the person's, by the id as their own table has
    it.
    """
    here = np.ones(table.num_rows, bool)
    for name, cell in zip(who.names, who.own, strict=True):
        if name not in table.column_names:
            return np.zeros(table.num_rows, bool)
        texts = pa.compute.cast(table.column(name), pa.string())
        # --spreadsheet writes ' before what a spreadsheet would compute.
        here &= np.array([each in (cell, f"'{cell}") for each in texts.to_pylist()], bool)
    return here
