"""Reads a study (methods x seeds x folds x label counts over one recipe), and makes the recipes of
its runs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vfl.simulation.baselines import COMBINED, alone, by_oneself, combine_columns
from vfl.simulation.federation import on_one_machine
from vfl.simulation.own_files import of_party_files
from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name, PhaseSettings, TransformSettings
from vfl_common.errors import Code, InputError

Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Phases = tuple[PhaseSettings, ...]
Stage = Literal["pretrain", "finetune"]
# The keys of the recipe that the study sets, or that must be equal in all of its runs.
_OURS = (
    "name",
    "phases",
    "seed",
    "start",
    "rows.labelled",
    "rows.folds",
    "rows.fold",
    "simulate.threads",
)
# The columns that a method learns from: each party's own, all in one place, or those of one party.
Group = Literal["federated", "pooled", "alone"]
GROUPS: tuple[Group, ...] = ("federated", "pooled", "alone")


class StudyMethod(Section):
    """A method of the study: one line of the result."""

    name: Name
    # The encoders of the pretraining serve all label counts.
    pretrain: Phases = ()
    # An earlier method, whose pretraining this one shares.
    pretrain_of: Name | None = None
    # The only encoder of the pretraining's two to start from.
    tower: Literal["cross", "local"] | None = None
    # The method's own phases, instead of the study's.
    finetune: Phases = ()
    # This party trains by itself, with the labels.
    alone: Name | None = None
    # Whether one party has all columns and the labels.
    combined: bool = False
    # Changes to the recipe: {"model.encoder.channels": value}.
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> StudyMethod:
        for key, value in self.overrides.items():
            ours = next((ours for ours in _OURS if _overrides(key, value, ours)), None)
            if ours is not None:
                raise ValueError(f"overrides: the study sets {ours!r}. Remove it from overrides.")
        if self.pretrain and self.pretrain_of is not None:
            raise ValueError("pretrain and pretrain_of exclude each other. Give one of them.")
        if self.alone is not None and self.combined:
            raise ValueError("alone and combined exclude each other. Give one of them.")
        if self.tower is not None and self.pretrain_of is None:
            raise ValueError(
                "tower: selects an encoder of another method's pretraining. Give pretrain_of, too."
            )
        return self

    @property
    def group(self) -> Group:
        """The columns that it learns from."""
        return "alone" if self.alone is not None else "pooled" if self.combined else "federated"

    @property
    def federation(self) -> tuple[Any, ...]:
        """The settings that determine the parties and their data."""
        return self.overrides, self.alone, self.combined


class StudyFile(Section):
    """A study file."""

    name: Name
    # A recipe with [simulate], or the files of all parties; phases, seed and rows.labelled are
    # replaced.
    recipe: str | Annotated[tuple[str, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    # The values of rows.labelled; empty: one column, with the recipe's own.
    labels: tuple[PositiveInt, ...] = ()
    # Cross-validation: each fold of the rows is for testing once, with every seed.
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    # A metric of the test rows.
    metric: str = "accuracy"
    finetune: Phases = ()
    methods: Annotated[tuple[StudyMethod, ...], Field(min_length=1)]

    @property
    def in_groups(self) -> tuple[StudyMethod, ...]:
        """The methods, sorted by group."""
        return tuple(sorted(self.methods, key=lambda method: GROUPS.index(method.group)))

    @model_validator(mode="after")
    def _check(self) -> StudyFile:
        named = {
            "methods": [method.name for method in self.methods],
            "seeds": self.seeds,
            "labels": self.labels,
        }
        for key, values in named.items():
            double = next((value for value in values if list(values).count(value) > 1), None)
            if double is not None:
                raise ValueError(f"{key}: {double!r} appears twice. Remove one.")
        for method in self.methods:
            if method.pretrain_of is not None:
                earlier = self.methods[: self.methods.index(method)]
                other = next((m for m in earlier if m.name == method.pretrain_of), None)
                if other is None or not other.pretrain:
                    raise ValueError(
                        f"methods: {method.name}: pretrain_of: no method {method.pretrain_of!r} "
                        "above it has its own pretraining. Name one that has."
                    )
                if other.federation != method.federation:
                    raise ValueError(
                        f"methods: {method.name}: pretrain_of: the two methods have different "
                        "overrides or parties. Make them equal."
                    )
            if not self.finetune and not method.finetune:
                raise ValueError(
                    f"methods: {method.name} has no phases. Give [[finetune]], or its own finetune."
                )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study. ``tables``: its recipe as written; ``recipe``: the parsed form."""

    run_id: str
    stage: Stage
    method: str
    seed: int
    labels: int | None
    # The number of the fold from 1; None without folds.
    fold: int | None
    tables: dict[str, Any]
    recipe: Recipe

    @property
    def title(self) -> str:
        """The run's name for people: ``FedHSSL, seed 1, 100 labels``."""
        parts = [self.method, f"seed {self.seed}"]
        if self.fold is not None:
            parts.append(f"fold {self.fold}")
        if self.stage == "pretrain":
            parts.append("pretraining")
        elif self.labels is not None:
            parts.append(f"{self.labels} labels")
        return ", ".join(parts)


@dataclass(frozen=True)
class Pipeline:
    """The runs of one method with one seed and fold: pretraining, if any, then a run for each label
    count.

    The pretraining may be shared with an earlier pipeline.
    """

    pretrain: PlannedRun | None
    finetune: tuple[PlannedRun, ...]

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """All runs, the pretraining first."""
        return (*([self.pretrain] if self.pretrain is not None else ()), *self.finetune)


def load_study(path: Path, *, folds: int | None = None) -> tuple[StudyFile, list[Pipeline]]:
    """Reads a study file and plans it, seed by seed. ``folds`` replaces the file's. Raises
    InputError if the study or one of its recipes is invalid.
    """
    written = read_tables(path, "study") | ({} if folds is None else {"folds": folds})
    study = parse(StudyFile, written, str(path))
    first = study.recipe if isinstance(study.recipe, str) else study.recipe[0]
    base = path.resolve().parent / first
    tables = on_one_machine(recipe_of(path, study)[0])
    if "start" in tables:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{base}: start: the study sets the start of its runs. Remove it here.",
        )
    if parse(Recipe, tables, str(base)).simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{base}: simulate: is missing, but a study runs on this machine. Add [simulate].",
        )
    chains = []
    folds_: list[int | None] = [None] if study.folds is None else [*range(1, study.folds + 1)]
    for seed, fold in itertools.product(study.seeds, folds_):
        pretrained: dict[str, PlannedRun] = {}
        for method in study.methods:
            chain = _chain(path, study, method, tables, seed, fold, pretrained)
            if chain.pretrain is not None:
                pretrained[method.name] = chain.pretrain
            _check_metric(path, study, chain)
            chains.append(chain)
    return study, chains


def recipe_of(path: Path, study: StudyFile) -> tuple[dict[str, Any], Path]:
    """Returns the tables of a study's recipe, and the folder of its relative paths. Raises
    InputError.
    """
    folder = path.resolve().parent
    if isinstance(study.recipe, str):
        recipe = folder / study.recipe
        return read_tables(recipe, "recipe"), recipe.parent
    return of_party_files([folder / name for name in study.recipe])


def _check_metric(path: Path, study: StudyFile, chain: Pipeline) -> None:
    """Raises InputError if the method's task has no such metric."""
    task = chain.finetune[0].recipe.task
    if study.metric not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: metric: a {task.kind} task has no test metric {study.metric!r}. Choose "
            f"one of {', '.join(task.all_metrics)}.",
        )


def _chain(
    path: Path,
    study: StudyFile,
    method: StudyMethod,
    base: dict[str, Any],
    seed: int,
    fold: int | None,
    pretrained: Mapping[str, PlannedRun],
) -> Pipeline:
    """Plans one method with one seed and fold. ``pretrained``: {method: its pretraining} of the
    methods above.
    """
    where = f"{path}: methods: {method.name}"
    tables = copy.deepcopy(base) | {"seed": seed}
    for key, value in method.overrides.items():
        _set(tables, key, value, where)
    if fold is not None:
        # A fold replaces the test rows.
        rows = {key: value for key, value in tables.get("rows", {}).items() if key != "test"}
        tables["rows"] = rows | {"folds": study.folds, "fold": fold}
    shared = _tables_of(study.finetune)
    if method.alone is not None or method.combined:
        recipe, folder, shared = (
            parse(Recipe, tables, where),
            recipe_of(path, study)[1],
            by_oneself(shared, method.alone or COMBINED),
        )
        if method.alone is not None:
            tables = alone(tables, recipe, method.alone, folder, where)
        else:
            tables = combine_columns(tables, recipe, folder, where)
        for key in ("wire", "report"):
            tables.pop(key, None)
    name = f"{study.name}.{method.name}.s{seed}" + ("" if fold is None else f".k{fold}")
    tuning = tables | {"phases": _tables_of(method.finetune) or shared}
    pretrain: PlannedRun | None = None
    if method.pretrain:
        phases = _tables_of(method.pretrain)
        first = tables | {"phases": phases}
        # Nothing is measured yet, so there is nothing to report.
        first.pop("report", None)
        # One pretraining serves all label counts, so it must not depend on rows.labelled.
        if study.labels:
            first["rows"] = {
                key: value for key, value in tables.get("rows", {}).items() if key != "labelled"
            }
        first = _select_wire(first)
        recipe = parse(Recipe, first, f"{where}: pretrain")
        pretrain = PlannedRun(name, "pretrain", method.name, seed, None, fold, first, recipe)
        tuning["start"] = {"run": name, "phases": phases}
    elif method.pretrain_of is not None:
        pretrain = pretrained[method.pretrain_of]
        tuning["start"] = {"run": pretrain.run_id, "phases": pretrain.tables["phases"]}
        if method.tower is not None:
            tuning["start"]["tower"] = method.tower
    runs = []
    for labels in study.labels or (None,):
        # The suffix makes the name differ from the pretraining's.
        run_id = (
            f"{name}.n{labels}"
            if labels is not None
            else f"{name}.finetune"
            if pretrain is not None
            else name
        )
        own = dict(tuning)
        if labels is not None:
            own["rows"] = tables.get("rows", {}) | {"labelled": labels}
        own = _select_wire(own)
        recipe = parse(Recipe, own, f"{where}: finetune")
        runs.append(PlannedRun(run_id, "finetune", method.name, seed, labels, fold, own, recipe))
    return Pipeline(pretrain, tuple(runs))


def _select_wire(tables: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe without the tables of ``wire`` for phases of other methods."""
    if "wire" not in tables:
        return tables
    names = {phase.get("name", phase["kind"]) for phase in tables["phases"]}
    return tables | {
        "wire": [wire for wire in tables["wire"] if wire.get("phase") in (None, *names)]
    }


def _overrides(key: str, value: Any, ours: str) -> bool:
    """Returns whether ``key = value`` sets ``ours`` or a key below it, directly or inside a
    table.
    """
    if key == ours or key.startswith(f"{ours}."):
        return True
    if not ours.startswith(f"{key}."):
        return False
    for part in ours.removeprefix(f"{key}.").split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _tables_of(phases: Phases) -> list[dict[str, Any]]:
    """Returns phases as tables of a recipe."""
    return [
        _table_of(phase)
        | ({"transforms": [_table_of(t) for t in phase.transforms]} if phase.transforms else {})
        for phase in phases
    ]


def _table_of(settings: PhaseSettings | TransformSettings) -> dict[str, Any]:
    """Returns a phase or transform as people write it: its own settings next to its kind."""
    return (
        settings.model_dump(exclude_defaults=True, exclude={"settings", "transforms"})
        | settings.settings
    )


def _set(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Sets ``a.b.c`` and makes missing tables. Raises InputError if ``a`` or ``a.b`` is not a
    table.
    """
    *path, last = key.split(".")
    table = tables
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: overrides: {key!r}: {part} is not a table of the recipe. Correct the "
                "key.",
            )
    table[last] = value
