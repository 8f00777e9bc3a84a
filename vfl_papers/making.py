"""Writes tables, recipe and summary into a new folder. After an error, nothing is left behind."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.simulation.federation import to_lines, to_toml
from vfl.summary.table import format_size
from vfl_common.config.base import parse, read_toml
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic, write_error
from vfl_common.text import list_names
from vfl_papers import dividing
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    VALIDATION,
    Array,
    Content,
    ContentPart,
    DataSet,
    Division,
    Files,
    PaperUse,
    Request,
    Rows,
)
from vfl_papers.writing import ID, LABEL, SPLIT, PartyTable, SharedColumns, write_parts


@dataclass(frozen=True)
class PreparePlan:
    """The checked arguments of ``vfl prepare``, with defaults filled in.

    Args:
        name: The name of the data set.
        dataset: The description of the data set.
        use: The paper's use of the data set, which provides the defaults.
        division: The way to divide the data set among the parties.
        request: The number of parties, seed and settings for the division.
        validation: The share of the training rows for validation.
        numbers: The paper's use whose hyperparameters the recipe gets; None if no paper uses a
            division like this one.
    """

    name: str
    dataset: DataSet
    use: PaperUse
    division: Division
    request: Request
    validation: float
    numbers: PaperUse | None


def resolve(
    name: str,
    dataset: DataSet,
    *,
    parties: int | None,
    seed: int,
    paper: str | None,
    divide: str | None,
    deal: str | None,
    active: int,
    validation: float | None,
    options: Mapping[str, Any],
) -> PreparePlan:
    """Checks the arguments of ``vfl.prepare``, and fills in the paper's values as defaults. Raises
    InputError if an argument does not fit the data set.
    """
    use = _choose_use(dataset, paper, divide)
    division = _choose_division(dataset, use, divide)
    count = _choose_party_count(division, use, parties)
    request = Request(
        count,
        _check_active(division, active, count),
        seed,
        deal or use.deal,
        _fill_options(dataset, division, options),
    )
    if deal is not None and division.aligned:
        raise InputError(
            Code.CONFIG_INVALID,
            "deal: needs a division by rows, but this division gives all parties the same rows. "
            "Give divide = rows, or leave deal out.",
        )
    share = use.validation if validation is None else validation
    matching_uses = (
        paper_use
        for paper_use in (use, *dataset.uses)
        if dataset.divisions[paper_use.division].aligned == division.aligned
    )
    return PreparePlan(
        name, dataset, use, division, request, _check_share(share), next(matching_uses, None)
    )


def _choose_use(dataset: DataSet, paper: str | None, divide: str | None) -> PaperUse:
    if paper is None:
        return next((use for use in dataset.uses if use.division == divide), dataset.uses[0])
    papers = {use.paper.lower().replace("-", ""): use for use in dataset.uses}
    use = papers.get(paper.lower().replace("-", ""))
    if use is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"paper: {paper!r} has no experiment with {dataset.title}. Choose one of "
            f"{', '.join(paper_use.paper for paper_use in dataset.uses)}, or leave it out.",
        )
    return use


def _choose_division(dataset: DataSet, use: PaperUse, divide: str | None) -> Division:
    division = dataset.divisions.get(divide or use.division)
    if division is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"divide: {dataset.title} cannot be divided by {divide!r}. Choose one of "
            f"{', '.join(dataset.divisions)}.",
        )
    return division


def _choose_party_count(division: Division, use: PaperUse, parties: int | None) -> int:
    fits = not division.parties or use.parties in division.parties
    count = parties or (use.parties if fits else division.parties[0])
    if count < 1 or (division.parties and count not in division.parties):
        possible = " or ".join(map(str, division.parties)) or "1 or more"
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties: this division is not possible among {count} parties. Give {possible}.",
        )
    return count


def _check_active(division: Division, active: int, parties: int) -> int:
    if not 1 <= active <= parties:
        raise InputError(
            Code.CONFIG_INVALID,
            f"active: must be a party's number (got {active}). Give 1 to {parties}.",
        )
    if active != 1 and not division.aligned:
        raise InputError(
            Code.CONFIG_INVALID,
            "active: cannot be set with this division, because the party with the labels has no "
            "images. Leave active out.",
        )
    return active


def _fill_options(
    dataset: DataSet, division: Division, options: Mapping[str, Any]
) -> dict[str, Any]:
    division_of = {key: how for how, d in dataset.divisions.items() for key in d.settings}
    for key in options:
        if key in division_of and key not in division.settings:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: applies only with divide = {division_of[key]}. Set that, or leave {key} "
                "out.",
            )
        if key not in dataset.options:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: is not a setting of {dataset.title} (settings: "
                f"{', '.join(dataset.options) or 'none'}). Leave it out.",
            )
    return {key: options.get(key, default) for key, (default, _) in dataset.options.items()}


def _check_share(validation: float) -> float:
    if not 0.0 <= validation < 1.0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"validation: must be at least 0 and less than 1 (got {validation}). Correct it.",
        )
    return validation


RECIPE, SUMMARY = "recipe.toml", "PREPARED.md"
# A function that is called with the number of rows written so far, and the number of all rows.
Progress = Callable[[int, int], None]


def refuse_folder(folder: Path, *, replace: bool) -> None:
    """Raises InputError if the folder is not empty, unless ``replace`` is set and ``vfl prepare``
    wrote all of its files.
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
            f"out: {folder} already has files of `vfl prepare`. Give another folder, or set "
            "replace.",
        )
    own_names = _list_own_files(folder)
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in own_names)
    if foreign:
        raise InputError(
            Code.FILE_INVALID,
            f"out: {folder} has other files, which replace would remove: {list_names(foreign)}. "
            "Move them away, or give another folder.",
        )


def _list_own_files(folder: Path) -> set[str]:
    """Returns the names of the files that an earlier ``vfl prepare`` wrote."""
    names = {SUMMARY, RECIPE}
    if (folder / RECIPE).is_file():
        tables = read_toml(folder / RECIPE)
        parties = tables.get("simulate", {}).get("parties", {})
        names |= {str(party.get("source")) for party in parties.values()}
    return names


@dataclass(frozen=True)
class DataWriter:
    """Writes the parties' tables, the recipe and the summary.

    Args:
        plan: The checked arguments of ``vfl prepare``.
        content: All rows of the data set.
        used: The numbers of the rows that are used.
        parts: The parts of the parties, with row numbers in ``content``.
        beside: The ids, labels and splits of ``content``.
        files: The files that were read.
        notes: The differences from the official data set.
    """

    plan: PreparePlan
    content: Content
    used: Rows
    parts: Sequence[ContentPart]
    beside: SharedColumns
    files: Files
    notes: tuple[str, ...]

    def write(
        self, folder: Path, progress: Progress | None
    ) -> tuple[list[PartyTable], tuple[str, ...]]:
        """Writes all files into a temporary folder, which then replaces ``folder``. Returns the
        parties' tables and all notes. Raises InputError.
        """
        temporary = _make_temporary(folder)
        try:
            written = self._write_tables(temporary, progress)
            recipe, lowered = self._make_recipe(written)
            write_atomic(temporary / RECIPE, make_header(self.plan) + recipe)
            notes = (*self.notes, *self.content.afterwards(), *lowered)
            paragraphs = _describe_data(self, notes, written)
            write_atomic(temporary / SUMMARY, "\n\n".join(paragraphs) + "\n")
            _move_folder(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return written, notes

    def _write_tables(self, folder: Path, progress: Progress | None) -> list[PartyTable]:
        tables: dict[str, PartyTable] = {}
        done, total = 0, self._count_rows()
        for step in write_parts(self.content, self.parts, self.used, self.beside, folder):
            if isinstance(step, PartyTable):
                tables[step.name] = step
                continue
            done += step
            if progress is not None:
                progress(done, total)
        return [tables[part.name] for part in self.parts]

    def _count_rows(self) -> int:
        """Returns the number of rows to read. Rows that several parties share are read once."""
        rows_by_party = [part.rows for part in self.parts if part.pick is not None]
        unshared = sum(len(rows) for rows in rows_by_party if rows is not None)
        shared = len(self.used) if any(rows is None for rows in rows_by_party) else 0
        return unshared + shared

    def _make_recipe(self, written: Sequence[PartyTable]) -> tuple[str, list[str]]:
        """Returns the recipe as TOML, and a note for each value that differs from the paper's.
        Raises InputError if the recipe is invalid.
        """
        tables = self._make_recipe_tables()
        counts = count_training_rows(self.parts, self.used, self.beside.splits, tables["rows"])
        fitted, notes = fit(tables, counts, dealt=not self.plan.division.aligned)
        has_splits = self.beside.splits is not None
        data = {
            part.name: _make_data_settings(part, table, has_splits=has_splits)
            for part, table in zip(self.parts, written, strict=True)
        }
        recipe = fitted | {"simulate": {"parties": data}}
        parse(Recipe, recipe, f"the recipe of {self.plan.name}")
        # Each party gets its own table, because inline tables would all be on one line.
        lines = (f"\n[simulate.parties.{name}]\n{to_lines(keys)}" for name, keys in data.items())
        return to_toml(fitted) + "".join(lines), notes

    def _make_recipe_tables(self) -> dict[str, Any]:
        method = dict(self._choose_method())
        rows: dict[str, Any] = {"align": "digest" if self.plan.division.aligned else "none"}
        if self.beside.splits is not None:
            rows |= {"split": "column"} | self._compute_shares(self.beside.splits)
        elif self.plan.validation:
            rows["validation"] = self.plan.validation
        return {
            "name": self.plan.name,
            "seed": self.plan.request.seed,
            "task": dict(self.plan.dataset.task),
            "parties": [_make_roster_entry(part) for part in self.parts],
            "rows": rows | dict(method.pop("rows", {})),
            "model": method.pop("model"),
            "phases": [self._complete_phase(phase) for phase in method.pop("phases")],
            **method,
        }

    def _compute_shares(self, splits: Array) -> dict[str, float]:
        """Returns the shares of the rows in the validation and test splits. Forecasts and passive
        parties need them in the recipe.
        """
        used_splits = splits[self.used]
        return {
            name: round(float((used_splits == name.encode()).mean()), 6)
            for name in (VALIDATION, TEST)
        }

    def _choose_method(self) -> Mapping[str, Any]:
        """Returns the recipe tables of the paper's method, or of a default for the division."""
        if self.plan.numbers is not None:
            return self.plan.numbers.recipe
        aligned = self.plan.division.aligned
        return dividing.splitnn({"kind": "mlp"}, 32) if aligned else dividing.mocosfl()

    def _complete_phase(self, phase: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the image shape to a phase of MocoSFL, whose active party has no images."""
        if phase["kind"] != "mocosfl":
            return dict(phase)
        shape = next(self.content.blocks(self.used[:1])).shape
        channels = shape[3] if len(shape) > 3 else 1
        return {"kind": "mocosfl", "image": [channels, *shape[1:3]]} | dict(phase)


def _make_roster_entry(part: ContentPart) -> dict[str, Any]:
    """Returns a party's entry in the recipe's list of parties."""
    entry: dict[str, Any] = {"name": part.name, "role": "active" if part.label else "passive"}
    if part.pick is None:
        entry["features"] = False
    return entry if part.encoder is None else entry | {"encoder": part.encoder}


def _make_data_settings(
    part: ContentPart, written: PartyTable, *, has_splits: bool
) -> dict[str, Any]:
    """Returns the data settings of a party, for the recipe's table ``simulate.parties``."""
    data: dict[str, Any] = {"source": written.path.name, "id": ID}
    if part.label:
        data["label"] = LABEL
    if has_splits:
        data["split"] = SPLIT
    if part.pick is None:
        data["columns"] = []
    elif written.path.suffix == ".npz":
        # This scales pixels to the range 0 to 1 at every party.
        data["scale"] = "minmax"
    return data | part.settings


def _make_temporary(folder: Path) -> Path:
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    except OSError as error:
        raise write_error(folder, error) from None


def _move_folder(source: Path, folder: Path) -> None:
    try:
        source.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        source.rename(folder)
    except OSError as error:
        raise write_error(folder, error) from None


# The defaults of a recipe's ``rows.validation`` and ``rows.test``.
_VALIDATION, _TEST = 0.1, 0.2


def count_training_rows(
    parts: Sequence[ContentPart], used: Rows, splits: Array | None, rows: Mapping[str, Any]
) -> list[int]:
    """Returns the number of training rows of each party with features.

    ``rows``: The table ``rows`` of the recipe.
    """
    rows_by_party = [
        used if part.rows is None else part.rows for part in parts if part.pick is not None
    ]
    if splits is not None:
        return [int((splits[numbers] == TRAIN.encode()).sum()) for numbers in rows_by_party]
    # In cross-validation, one fold replaces the test rows.
    test = 1 / rows["folds"] if "folds" in rows else rows.get("test", _TEST)
    shares = rows.get("validation", _VALIDATION), test
    return [
        len(numbers) - sum(math.ceil(len(numbers) * share) for share in shares)
        for numbers in rows_by_party
    ]


def fit(
    tables: Mapping[str, Any], counts: Sequence[int], *, dealt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Lowers values of a recipe that are too large for the number of rows. Returns the changed
    tables, and a note for each lowered value.

    Args:
        tables: The tables of the recipe.
        counts: The number of training rows of each party.
        dealt: Whether the parties have different rows.
    """
    rows, notes = dict(tables["rows"]), []
    smallest = max(1, min(counts))
    common = max(1, int(smallest * rows.get("aligned", 1.0)))
    if rows.get("labelled", 0) > common:
        notes.append(_describe_lowering("rows.labelled", rows["labelled"], common))
        rows["labelled"] = common
    phases = []
    for phase in tables["phases"]:
        limits = {
            "batch_size": common if phase["kind"] == "fedhssl" else smallest,
            "queue": max(1, (sum(counts) if dealt else smallest) - 1),
        }
        for key, limit in limits.items():
            if phase.get(key, 0) > limit:
                notes.append(_describe_lowering(f"{phase['kind']}.{key}", phase[key], limit))
                phase = phase | {key: limit}
        phases.append(phase)
    return dict(tables) | {"rows": rows, "phases": phases}, notes


def _describe_lowering(key: str, paper_value: int, value: int) -> str:
    return f"{key} is {value:,} (paper: {paper_value:,}), because there are fewer training rows."


def make_header(plan: PreparePlan) -> str:
    """Returns the comment at the top of a recipe."""
    return (
        f"# {plan.dataset.title}: {plan.division.says}.\n"
        f"# The values are {_describe_origin(plan)}.\n"
        "# Written by `vfl prepare`; see PREPARED.md. Run it with `vfl simulate`.\n\n"
    )


def _describe_origin(plan: PreparePlan) -> str:
    use = plan.numbers
    if use is None:
        return "our own, because no paper divides the data set like this"
    return f"from {use.paper} ({use.where})"


def _describe_data(
    writer: DataWriter, notes: Sequence[str], written: Sequence[PartyTable]
) -> Iterator[str]:
    """Yields the paragraphs of the summary, in Markdown."""
    plan = writer.plan
    dataset, use, request = plan.dataset, plan.numbers, plan.request
    who = "parties" if plan.division.aligned else "clients"
    yield f"# {dataset.title}, prepared for {request.parties} {who}"
    yield (
        f"The parties have {plan.division.says}. The values of the recipe are "
        f"{_describe_origin(plan)}. All draws use the seed {request.seed}."
    )
    lines = [
        f"| {table.name} | `{table.path.name}` | {table.rows:,} | {table.features} | "
        f"{format_size(table.bytes)} |"
        for table in written
    ]
    yield "\n".join(
        ["| party | table | rows | features | size |", "| --- | --- | --- | --- | --- |", *lines]
    )
    yield _describe_rows(plan, writer.content, writer.used)
    if not plan.division.aligned:
        yield f"Rows were dealt to clients: `{request.deal}`; test rows evenly."
    for key, value in request.options.items():
        yield f"`{key} = {value}`: {dataset.options[key][1]}"
    yield "## Sources"
    read = "\n".join(
        f"- `{path.name}`, {format_size(path.stat().st_size)}" for path in writer.files.values()
    )
    yield f"{dataset.title} is published by {dataset.publisher}. These files were read:\n\n{read}"
    yield "## Differences"
    if notes:
        yield "\n".join(f"- {note}" for note in notes)
    else:
        yield "These are all rows of the official files, unchanged."
    if use is not None and use.silent:
        yield f"## What {use.paper} does not specify"
        yield use.silent


def _describe_rows(plan: PreparePlan, content: Content, used: Rows) -> str:
    """Returns a sentence about the splits, and the names of the classes by number."""
    text = "These files define no splits, so the recipe divides the rows."
    if content.splits is not None:
        counts = Counter(content.splits[used].tolist())
        sizes = ", ".join(
            f"{counts[split]:,} {split}" for split in (TRAIN, VALIDATION, TEST) if counts[split]
        )
        text = f"{content.split_says}: {sizes}."
        if plan.validation:
            text += f" {100 * plan.validation:g} % of these training rows are for validation."
    if content.classes:
        named = ", ".join(f"{number} {name}" for number, name in enumerate(content.classes))
        text += f" Classes: {named}."
    return text
