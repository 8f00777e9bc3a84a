"""Reads a study file, and plans its runs: a recipe for each combination of method, seed, fold and
label count.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vfl.simulation.baselines import COMBINED, adapt_phases, alone, combine_columns
from vfl.simulation.federation import add_rejoin_deadline, combine_party_files
from vfl_common.config.base import Section, parse, read_tables
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name, PhaseSettings, TransformSettings
from vfl_common.errors import Code, InputError

Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Phases = tuple[PhaseSettings, ...]
Stage = Literal["pretrain", "finetune"]
# The keys of the recipe that the study sets itself, so that a method must not override them.
_STUDY_KEYS = (
    "name",
    "phases",
    "seed",
    "start",
    "rows.labelled",
    "rows.folds",
    "rows.fold",
    "simulate.threads",
)
# The columns that a method trains on: federated, pooled in one place, or of one party alone.
Group = Literal["federated", "pooled", "alone"]
GROUPS: tuple[Group, ...] = ("federated", "pooled", "alone")


class StudyMethod(Section):
    """A method of the study, which is one line of the results."""

    name: Name
    # The phases of the pretraining. One pretraining is used for all label counts.
    pretrain: Phases = ()
    # The name of an earlier method. This method starts from its pretraining.
    pretrain_of: Name | None = None
    # The encoder to start from, if the pretraining trains two encoders at each party.
    tower: Literal["cross", "local"] | None = None
    # The phases of this method; if empty, the phases of the study are used.
    finetune: Phases = ()
    # The name of a party that trains alone, with the labels.
    alone: Name | None = None
    # Whether one party trains with all columns and the labels.
    combined: bool = False
    # Changes to the recipe: {"model.encoder.channels": value}.
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> StudyMethod:
        for key, value in self.overrides.items():
            study_key = next((k for k in _STUDY_KEYS if _overrides(key, value, k)), None)
            if study_key is not None:
                raise ValueError(
                    f"overrides: the study sets {study_key!r} itself. Remove it from overrides."
                )
        if self.pretrain and self.pretrain_of is not None:
            raise ValueError("pretrain and pretrain_of cannot be combined. Give one of them.")
        if self.alone is not None and self.combined:
            raise ValueError("alone and combined cannot be used together. Give one of them.")
        if self.tower is not None and self.pretrain_of is None:
            raise ValueError(
                "tower: selects an encoder of another method's pretraining. Give pretrain_of too."
            )
        return self

    @property
    def group(self) -> Group:
        """The columns that the method trains on."""
        return "alone" if self.alone is not None else "pooled" if self.combined else "federated"

    @property
    def federation(self) -> tuple[Any, ...]:
        """The settings that determine the parties and their data."""
        return self.overrides, self.alone, self.combined


class StudyFile(Section):
    """A study file."""

    name: Name
    # A recipe with [simulate], or the party files of all parties. The study replaces its phases,
    # seed and rows.labelled.
    recipe: str | Annotated[tuple[str, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    # The values of rows.labelled; if empty, the value of the recipe is used.
    labels: tuple[PositiveInt, ...] = ()
    # The number of folds of a cross-validation, which is repeated for every seed.
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    # The metric on the test rows that the study compares.
    metric: str = "accuracy"
    finetune: Phases = ()
    methods: Annotated[tuple[StudyMethod, ...], Field(min_length=1)]

    @property
    def in_groups(self) -> tuple[StudyMethod, ...]:
        """The methods, sorted by group."""
        return tuple(sorted(self.methods, key=lambda method: GROUPS.index(method.group)))

    @model_validator(mode="after")
    def _check(self) -> StudyFile:
        values_by_key = {
            "methods": [method.name for method in self.methods],
            "seeds": self.seeds,
            "labels": self.labels,
        }
        for key, values in values_by_key.items():
            double = next((value for value in values if list(values).count(value) > 1), None)
            if double is not None:
                raise ValueError(f"{key}: {double!r} appears twice. Remove one.")
        for method in self.methods:
            if method.pretrain_of is not None:
                earlier = self.methods[: self.methods.index(method)]
                other = next((m for m in earlier if m.name == method.pretrain_of), None)
                if other is None or not other.pretrain:
                    raise ValueError(
                        f"methods: {method.name}: pretrain_of: no earlier method is named "
                        f"{method.pretrain_of!r} and has pretrain. Name an earlier method with "
                        "pretrain."
                    )
                if other.federation != method.federation:
                    raise ValueError(
                        f"methods: {method.name}: pretrain_of: the two methods have different "
                        "values of overrides, alone or combined. Make them equal."
                    )
            if not self.finetune and not method.finetune:
                raise ValueError(
                    f"methods: {method.name}: has no phases. Give [[finetune]], or finetune of the "
                    "method."
                )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    ``tables`` is the recipe as TOML tables, and ``recipe`` the parsed recipe.
    """

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
        """A readable name of the run, such as ``FedHSSL, seed 1, 100 labels``."""
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
    """The runs of one method with one seed and fold: an optional pretraining, followed by a
    fine-tuning run for each label count.

    Several pipelines may share a pretraining.
    """

    pretrain: PlannedRun | None
    finetune: tuple[PlannedRun, ...]

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """All runs, the pretraining first."""
        return (*([self.pretrain] if self.pretrain is not None else ()), *self.finetune)


def load_study(path: Path, *, folds: int | None = None) -> tuple[StudyFile, list[Pipeline]]:
    """Reads a study file and plans its runs. ``folds`` replaces the number of folds in the file.
    Raises InputError if the study or one of its recipes is invalid.
    """
    study_tables = read_tables(path, "study") | ({} if folds is None else {"folds": folds})
    study = parse(StudyFile, study_tables, str(path))
    recipe_name = study.recipe if isinstance(study.recipe, str) else study.recipe[0]
    base = path.resolve().parent / recipe_name
    tables = add_rejoin_deadline(read_study_recipe(path, study)[0])
    if "start" in tables:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{base}: start: a study sets this key itself. Remove it from the recipe.",
        )
    if parse(Recipe, tables, str(base)).simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{base}: simulate: is missing, but a study simulates its runs. Add [simulate].",
        )
    chains = []
    fold_numbers: list[int | None] = [None] if study.folds is None else [*range(1, study.folds + 1)]
    for seed, fold in itertools.product(study.seeds, fold_numbers):
        pretrained: dict[str, PlannedRun] = {}
        for method in study.methods:
            chain = _plan_pipeline(path, study, method, tables, seed, fold, pretrained)
            if chain.pretrain is not None:
                pretrained[method.name] = chain.pretrain
            _check_metric(path, study, chain)
            chains.append(chain)
    return study, chains


def read_study_recipe(path: Path, study: StudyFile) -> tuple[dict[str, Any], Path]:
    """Returns the tables of a study's recipe, and the folder that its relative paths start from.
    Raises InputError.
    """
    folder = path.resolve().parent
    if isinstance(study.recipe, str):
        recipe = folder / study.recipe
        return read_tables(recipe, "recipe"), recipe.parent
    return combine_party_files([folder / name for name in study.recipe])


def _check_metric(path: Path, study: StudyFile, chain: Pipeline) -> None:
    """Raises InputError if the task of the pipeline's recipe does not have the study's metric."""
    task = chain.finetune[0].recipe.task
    if study.metric not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: metric: a {task.kind} task has no test metric {study.metric!r}. Choose "
            f"one of {', '.join(task.all_metrics)}.",
        )


def _plan_pipeline(
    path: Path,
    study: StudyFile,
    method: StudyMethod,
    base: dict[str, Any],
    seed: int,
    fold: int | None,
    pretrained: Mapping[str, PlannedRun],
) -> Pipeline:
    """Plans the runs of one method with one seed and fold.

    ``pretrained``: {earlier method: pretraining run}.
    """
    where = f"{path}: methods: {method.name}"
    tables = copy.deepcopy(base) | {"seed": seed}
    for key, value in method.overrides.items():
        _set_key(tables, key, value, where)
    if fold is not None:
        # The rows of the fold replace the share of test rows.
        rows = {key: value for key, value in tables.get("rows", {}).items() if key != "test"}
        tables["rows"] = rows | {"folds": study.folds, "fold": fold}
    shared_phases = _to_tables(study.finetune)
    if method.alone is not None or method.combined:
        recipe, folder, shared_phases = (
            parse(Recipe, tables, where),
            read_study_recipe(path, study)[1],
            adapt_phases(shared_phases, method.alone or COMBINED),
        )
        if method.alone is not None:
            tables = alone(tables, recipe, method.alone, folder, where)
        else:
            tables = combine_columns(tables, recipe, folder, where)
        for key in ("wire", "report"):
            tables.pop(key, None)
    name = f"{study.name}.{method.name}.s{seed}" + ("" if fold is None else f".k{fold}")
    tuning = tables | {"phases": _to_tables(method.finetune) or shared_phases}
    pretrain: PlannedRun | None = None
    if method.pretrain:
        phases = _to_tables(method.pretrain)
        pretrain_tables = tables | {"phases": phases}
        # A pretraining computes no metrics, so it needs no report.
        pretrain_tables.pop("report", None)
        # One pretraining serves all label counts, so it must not depend on rows.labelled.
        if study.labels:
            pretrain_tables["rows"] = {
                key: value for key, value in tables.get("rows", {}).items() if key != "labelled"
            }
        pretrain_tables = _select_wire(pretrain_tables)
        recipe = parse(Recipe, pretrain_tables, f"{where}: pretrain")
        pretrain = PlannedRun(
            name, "pretrain", method.name, seed, None, fold, pretrain_tables, recipe
        )
        tuning["start"] = {"run": name, "phases": phases}
    elif method.pretrain_of is not None:
        pretrain = pretrained[method.pretrain_of]
        tuning["start"] = {"run": pretrain.run_id, "phases": pretrain.tables["phases"]}
        if method.tower is not None:
            tuning["start"]["tower"] = method.tower
    runs = []
    for labels in study.labels or (None,):
        # A suffix distinguishes the fine-tuning run from the pretraining run.
        run_id = (
            f"{name}.n{labels}"
            if labels is not None
            else f"{name}.finetune"
            if pretrain is not None
            else name
        )
        run_tables = dict(tuning)
        if labels is not None:
            run_tables["rows"] = tables.get("rows", {}) | {"labelled": labels}
        run_tables = _select_wire(run_tables)
        recipe = parse(Recipe, run_tables, f"{where}: finetune")
        runs.append(
            PlannedRun(run_id, "finetune", method.name, seed, labels, fold, run_tables, recipe)
        )
    return Pipeline(pretrain, tuple(runs))


def _select_wire(tables: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe without the tables of ``wire`` that are for phases it does not have."""
    if "wire" not in tables:
        return tables
    names = {phase.get("name", phase["kind"]) for phase in tables["phases"]}
    return tables | {
        "wire": [wire for wire in tables["wire"] if wire.get("phase") in (None, *names)]
    }


def _overrides(key: str, value: Any, study_key: str) -> bool:
    """Returns whether ``key = value`` sets ``study_key`` or a key below it. ``value`` may be a
    table that contains it.
    """
    if key == study_key or key.startswith(f"{study_key}."):
        return True
    if not study_key.startswith(f"{key}."):
        return False
    for part in study_key.removeprefix(f"{key}.").split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _to_tables(phases: Phases) -> list[dict[str, Any]]:
    """Converts phases to tables of a recipe."""
    return [
        _to_table(phase)
        | ({"transforms": [_to_table(t) for t in phase.transforms]} if phase.transforms else {})
        for phase in phases
    ]


def _to_table(settings: PhaseSettings | TransformSettings) -> dict[str, Any]:
    """Converts a phase or transform to a table of a recipe, with its own settings next to kind."""
    return (
        settings.model_dump(exclude_defaults=True, exclude={"settings", "transforms"})
        | settings.settings
    )


def _set_key(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Sets a dotted key such as ``a.b.c``, and creates missing tables. Raises InputError if ``a``
    or ``a.b`` is not a table.
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
