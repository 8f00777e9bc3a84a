"""Writes tables, recipe and summary into a new folder, all or nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.preparing import recipes
from vfl.preparing.asked import PreparePlan
from vfl.preparing.content import TEST, VALIDATION, Array, Content, ContentPart, Rows
from vfl.preparing.dataset import Files
from vfl.preparing.fitting import fit, training_rows
from vfl.preparing.summary import header_of, text_of
from vfl.preparing.writing import ID, LABEL, SPLIT, Beside, Written, write_parts
from vfl.simulation.federation import to_lines, to_toml
from vfl_common.config.base import parse, read_toml
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic, write_error
from vfl_common.text import list_names

RECIPE, SUMMARY = "recipe.toml", "PREPARED.md"
# Called with the numbers of written and of all rows; a party's own rows count separately.
Progress = Callable[[int, int], None]


def refuse_folder(folder: Path, *, replace: bool) -> None:
    """Raises InputError if the folder has files, unless ``vfl prepare`` wrote them and may
    replace them.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise InputError(Code.FILE_INVALID, f"out: {folder} is a file. Give a folder.")
    if not (folder / SUMMARY).is_file():
        raise InputError(
            Code.FILE_INVALID,
            f"out: {folder} is not empty, and was not written by `vfl prepare`. Give another "
            "folder.",
        )
    if not replace:
        raise InputError(
            Code.FILE_INVALID,
            f"out: {folder} was written by `vfl prepare` already. Give another folder, or set "
            "replace.",
        )
    others = sorted(path.name for path in folder.iterdir() if path.name not in _ours(folder))
    if others:
        raise InputError(
            Code.FILE_INVALID,
            f"out: {folder} also holds {list_names(others)}, which replace removes. Move it away, "
            "or give another folder.",
        )


def _ours(folder: Path) -> set[str]:
    """Returns the names of the files that an earlier call has written."""
    names = {SUMMARY, RECIPE}
    if (folder / RECIPE).is_file():
        tables = read_toml(folder / RECIPE)
        parties = tables.get("simulate", {}).get("parties", {})
        names |= {str(party.get("source")) for party in parties.values()}
    return names


@dataclass(frozen=True)
class Making:
    """The tables, recipe and summary to write.

    Args:
        asked: the data set, its division and the request.
        content: all rows that were read.
        used: the numbers of those that are used.
        parts: the parties' parts of them, whose rows are numbers in ``content``.
        beside: ids, labels and splits of ``content``.
        files: the files that were read.
        notes: the differences from the official data set.
    """

    asked: PreparePlan
    content: Content
    used: Rows
    parts: Sequence[ContentPart]
    beside: Beside
    files: Files
    notes: tuple[str, ...]

    def write(
        self, folder: Path, progress: Progress | None
    ) -> tuple[list[Written], tuple[str, ...]]:
        """Writes into a temporary folder, and then replaces ``folder`` by it. Returns the parties'
        tables and all notes. Raises InputError.
        """
        made = _new_beside(folder)
        try:
            written = self._tables(made, progress)
            recipe, lowered = self._recipe(written)
            write_atomic(made / RECIPE, header_of(self.asked) + recipe)
            notes = (*self.notes, *self.content.afterwards(), *lowered)
            text = text_of(self.asked, self.content, self.used, self.files, notes, written)
            write_atomic(made / SUMMARY, text)
            _take_place(made, folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return written, notes

    def _tables(self, folder: Path, progress: Progress | None) -> list[Written]:
        tables: dict[str, Written] = {}
        done, total = 0, self._rows()
        for step in write_parts(self.content, self.parts, self.used, self.beside, folder):
            if isinstance(step, Written):
                tables[step.name] = step
                continue
            done += step
            if progress is not None:
                progress(done, total)
        return [tables[part.name] for part in self.parts]

    def _rows(self) -> int:
        """Returns the number of rows to read: once for all parties that share them."""
        having = [part.rows for part in self.parts if part.pick is not None]
        own = sum(len(rows) for rows in having if rows is not None)
        return own + (len(self.used) if any(rows is None for rows in having) else 0)

    def _recipe(self, written: Sequence[Written]) -> tuple[str, list[str]]:
        """Returns the recipe, and notes about values that are not the paper's. Raises InputError if
        the recipe is invalid.
        """
        tables = self._tables_of_recipe()
        counts = training_rows(self.parts, self.used, self.beside.splits, tables["rows"])
        fits, notes = fit(tables, counts, dealt=not self.asked.division.aligned)
        split = self.beside.splits is not None
        pairs = zip(self.parts, written, strict=True)
        data = {part.name: _data(part, table, split=split) for part, table in pairs}
        whole = fits | {"simulate": {"parties": data}}
        parse(Recipe, whole, f"the recipe of {self.asked.name}")
        # One table for each party: inline, a thousand of them would be one line.
        lines = (f"\n[simulate.parties.{name}]\n{to_lines(own)}" for name, own in data.items())
        return to_toml(fits) + "".join(lines), notes

    def _tables_of_recipe(self) -> dict[str, Any]:
        own = dict(self._method())
        rows: dict[str, Any] = {"align": "digest" if self.asked.division.aligned else "none"}
        if self.beside.splits is not None:
            rows |= {"split": "column"} | self._shares(self.beside.splits)
        elif self.asked.validation:
            rows["validation"] = self.asked.validation
        return {
            "name": self.asked.name,
            "seed": self.asked.request.seed,
            "task": dict(self.asked.dataset.task),
            "parties": [_place(part) for part in self.parts],
            "rows": rows | dict(own.pop("rows", {})),
            "model": own.pop("model"),
            "phases": [self._phase(phase) for phase in own.pop("phases")],
            **own,
        }

    def _shares(self, splits: Array) -> dict[str, float]:
        """Returns the shares of rows for validation and testing, which forecasts and passive
        parties' checks need.
        """
        own = splits[self.used]
        return {name: round(float((own == name.encode()).mean()), 6) for name in (VALIDATION, TEST)}

    def _method(self) -> Mapping[str, Any]:
        """Returns the tables of the paper's method, or of a default that fits the division."""
        if self.asked.numbers is not None:
            return self.asked.numbers.recipe
        aligned = self.asked.division.aligned
        return recipes.splitnn({"kind": "mlp"}, 32) if aligned else recipes.mocosfl()

    def _phase(self, phase: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a phase. MocoSFL's needs the shape of an image, as its active party has none."""
        if phase["kind"] != "mocosfl":
            return dict(phase)
        shape = next(self.content.blocks(self.used[:1])).shape
        channels = shape[3] if len(shape) > 3 else 1
        return {"kind": "mocosfl", "image": [channels, *shape[1:3]]} | dict(phase)


def _place(part: ContentPart) -> dict[str, Any]:
    """Returns a party's place in the roster."""
    place: dict[str, Any] = {"name": part.name, "role": "active" if part.label else "passive"}
    if part.pick is None:
        place["features"] = False
    return place if part.encoder is None else place | {"encoder": part.encoder}


def _data(part: ContentPart, written: Written, *, split: bool) -> dict[str, Any]:
    """Returns a party's [data], as the recipe has it under ``simulate.parties``."""
    data: dict[str, Any] = {"source": written.path.name, "id": ID}
    if part.label:
        data["label"] = LABEL
    if split:
        data["split"] = SPLIT
    if part.pick is None:
        data["columns"] = []
    elif written.path.suffix == ".npz":
        # The same scale, from 0 to 1, at every party.
        data["scale"] = "minmax"
    return data | part.settings


def _new_beside(folder: Path) -> Path:
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    except OSError as error:
        raise write_error(folder, error) from None


def _take_place(made: Path, folder: Path) -> None:
    try:
        made.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as error:
        raise write_error(folder, error) from None
