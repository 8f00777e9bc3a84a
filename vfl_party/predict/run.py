"""One party's part of a finished run: loads it for a prediction, selects the columns that it reads
of new rows, and reads the measured quality of its model for sets of parties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vfl_common.config.data import DataSettings, without_features
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.registry import ModelRegistry
from vfl_common.run_folder import RunFolder, read_plan
from vfl_common.stages import parse_position
from vfl_common.summary import Summary, load_summary, parse_holders
from vfl_common.text import hide_passwords
from vfl_party.assembly.models import encoder_settings
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.base.phase import Tree
from vfl_party.data import Preprocessor, Table
from vfl_party.data.join import own_columns
from vfl_party.models.metrics import first_metric, lower_is_better
from vfl_party.models.row_blocks import Blocks
from vfl_party.phases.course import Course
from vfl_party.phases.scoring import SOLO


@dataclass(frozen=True)
class TrainedRun:
    """One party's part of a finished run.

    ``encoder``: The settings of the party's encoder. ``state``: The job's state in the last
    checkpoint. ``path``: The party's folder in the run's folder. ``plugins``: {plug-in: version} at
    the start of the run. ``blocks``: The blocks in which each model computes rows; empty until the
    models have been checked.
    """

    run_id: str
    recipe: Recipe
    encoder: EncoderSettings
    state: Tree
    path: Path
    plugins: Mapping[str, str]
    blocks: dict[str, Blocks] = field(default_factory=dict, compare=False, repr=False)

    @property
    def says_parties(self) -> bool:
        """Whether a result names the parties that took part in each score."""
        recipe = self.recipe
        return (
            recipe.modelled != recipe.parties
            or recipe.rows.partial
            or recipe.own_rows
            or Course(recipe).learns != ""
        )

    @cached_property
    def quality(self) -> Quality:
        """The measured quality of the model for each set of participating parties.

        Raises InputError if the run's summary is damaged.
        """
        return read_quality(self.path.parent, self.recipe)

    @property
    def expects(self) -> str:
        """The metric whose expected value a result has for each row, or '' for none."""
        return self.quality.metric if self.says_parties and self.quality.by_party else ""


def load_trained(run: Path, name: str) -> TrainedRun:
    """Loads a party's part of a finished run.

    ``run``: The folder ``<out>/<run id>`` or the party's folder in it. Raises InputError if the run
    is missing, not finished or damaged.
    """
    path = run if run.name == name and (run / "run.json").exists() else run / name
    if not (path / "run.json").exists():
        raise InputError(
            Code.FILE_INVALID, f"{run}: has no run of {name}. Give the folder <out>/<run id>."
        )
    folder = RunFolder(path, path.resolve().parent.name)
    if not folder.facts().get("trained"):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{path}: this run is not finished. Finish it, or give another run.",
        )
    recipe = folder.recipe()
    phase_without_model = Course(recipe).keeps_nothing
    if phase_without_model is not None:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{path}: the phase {phase_without_model} of this run stores no model. Give a run of "
            "another method.",
        )
    store = CheckpointStore(path / "checkpoints", keep=2)
    labels = store.labels()
    if not labels:
        raise InputError(
            Code.CHECKPOINT_INVALID, f"{path}: has no checkpoints. Restore them, or train again."
        )
    if parse_position(labels[-1]) < sum(phase.rounds for phase in read_plan(folder)):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{path}: the run's last checkpoint is damaged or missing ({labels[-1]} is the newest "
            "complete one). Restore it, or train again.",
        )
    encoder, state = encoder_of(folder, recipe, name), store.load(labels[-1])["job"]
    return TrainedRun(
        folder.run_id, recipe, encoder, state, path, folder.facts().get("plugins", {})
    )


def load_joint(run: Path, name: str, without: Collection[str] = ()) -> TrainedRun:
    """Loads a run for a joint prediction, and removes the parties ``without`` from its recipe.

    Raises InputError if the run cannot be loaded, if it cannot score rows that only one party has,
    or if the model was not trained to predict without a party.
    """
    trained = load_trained(run, name)
    course = Course(trained.recipe)
    if trained.recipe.own_rows and not course.scores_own_rows:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{trained.path}: the parties of this run have different rows, and the run has no head "
            "that scores them. Add a phase of kind probe without hidden, or export the models of "
            "each party (vfl export model).",
        )
    if not without:
        return trained
    if name in without:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--without {name}: this command predicts for {name}. Leave out another party.",
        )
    if course.without == "wait" and not trained.recipe.own_rows:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--without {', '.join(without)}: the model of {trained.path} was not trained to "
            "predict without a party. Train it with subsets or party_dropout in its phase splitnn "
            "or head.",
        )
    return replace(trained, recipe=trained.recipe.without(without))


def encoder_of(folder: RunFolder, recipe: Recipe, name: str) -> EncoderSettings:
    """Returns the settings of the party's encoder, from the run's folder or else from the recipe.

    Raises InputError if ``run.json`` is damaged.
    """
    stored = folder.facts().get("encoder")
    try:
        own_settings = (
            TypeAdapter(EncoderSettings).validate_python(stored) if stored is not None else None
        )
    except ValidationError:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder.path / 'run.json'}: the settings of the encoder are damaged. Restore the "
            "file.",
        ) from None
    return encoder_settings(recipe, name, own_settings)


def load_start(recipe: Recipe, name: str, out: Path) -> TrainedRun | None:
    """Loads a party's part of the run whose weights the recipe starts from.

    ``name``: The party. ``out``: Its folder of runs. Returns None if the party starts with new
    weights. Raises InputError if the run is missing or not finished.
    """
    start = recipe.start
    if start is None or (start.held_by == "active" and name != recipe.active.name):
        return None
    try:
        return load_trained(out / start.run, name)
    except InputError as error:
        may_be_active = (
            error.code is Code.FILE_INVALID
            and recipe.rows.align == "none"
            and start.held_by == "every party"
        )
        raise InputError(
            error.code,
            f"recipe: start.run: {error} If only {recipe.active.name} has it, set start.held_by = "
            '"active".'
            if may_be_active
            else f"recipe: start.run: {error}",
        ) from None


def prediction_data(
    settings: DataSettings | None, source: str | None, state: Tree, query: str | None = None
) -> DataSettings:
    """Returns the settings for reading the rows to predict.

    They are the party file's [data] with another source or query. Of a table they select only the
    columns that were used in training, so new rows need no label and may have more columns.

    Args:
        settings: The party file's [data].
        source: Another source. A relative path starts at the working folder.
        state: The state of the trained run.
        query: Another query.

    Raises InputError if the party file has no [data], or if source and query do not fit.
    """
    if settings is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "data: the party file needs this table to know which column is the id. Add [data].",
        )
    changed = _apply_source(settings, source, query)
    if state["preprocessor"] is None:
        return without_features(changed)
    preprocessor = Preprocessor.from_state(state["preprocessor"])
    changed = changed.copy_layout_of(preprocessor.style)
    if settings.parts:
        return _select_training_columns_of_parts(settings, source, preprocessor)
    if changed.is_table and preprocessor.image_shape is None and settings.view is None:
        return _select_training_columns(
            changed, preprocessor.numeric_names, preprocessor.categorical_names
        )
    return changed


def _apply_source(settings: DataSettings, source: str | None, query: str | None) -> DataSettings:
    """Returns the settings with another source or query, where these are not None.

    Raises InputError if source and query do not fit each other.
    """
    changes: dict[str, Any] = {} if query is None else {"query": query}
    if source is not None:
        changes["source"] = DataSettings(source=source).absolute(Path()).source
    changed = settings.model_copy(update=changes)
    if query is not None and not changed.is_database:
        raise InputError(
            Code.CONFIG_INVALID,
            "--query: works only with a database. Remove it, or give --data such as "
            "postgresql://USER@HOST/NAME.",
        )
    if source is not None and changed.is_database and changed.query is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--data {hide_passwords(changed.source)}: is a database, and the party file has no "
            "query. Give a SELECT of the rows to predict with --query.",
        )
    return changed


def _select_training_columns(
    settings: DataSettings, numeric: tuple[str, ...], categorical: tuple[str, ...]
) -> DataSettings:
    """Returns a table's settings for only the columns of training, with the same kinds."""
    kinds = {"columns": (*numeric, *categorical), "numeric": numeric, "categorical": categorical}
    return settings.model_copy(update={"label": None, "drop": (), "as_trained": True, **kinds})


def _select_training_columns_of_parts(
    settings: DataSettings, source: str | None, preprocessor: Preprocessor
) -> DataSettings:
    """Returns the settings of joined tables, each with only its columns of training."""
    if source is not None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--data {hide_passwords(source)}: this party was trained on the joined tables of "
            "several parties, and one file cannot replace them. Predict from Python, with "
            "Run.predict.",
        )
    kinds = (preprocessor.numeric_names, preprocessor.categorical_names)
    parts = {
        name: _select_training_columns(
            part, *(own_columns(names, settings, name) for names in kinds)
        )
        if part.is_table and part.view is None
        else part
        for name, part in settings.parts.items()
    }
    return settings.model_copy(update={"parts": parts})


def unseen(trained: TrainedRun, table: Table) -> list[str]:
    """Returns a warning for each column of the rows to predict that differs from training.

    A column differs if it has new categories or numbers far outside the training range. The
    warnings contain no values. Raises InputError if the table lacks a column of training, or if the
    share of numbers outside the range exceeds the recipe's ``predict.refuse_outside``.
    """
    if trained.state["preprocessor"] is None:
        return []
    preprocessor = Preprocessor.from_state(trained.state["preprocessor"])
    sentences = [
        f"column {name!r} has categories that did not occur in training: in {count:,} of "
        f"{len(table):,} rows; the model has learnt nothing about them"
        for name, count in preprocessor.unseen(table).items()
    ]
    share = trained.recipe.predict.refuse_outside
    for name, count in preprocessor.outside(table).items():
        if share is not None and count > share * len(table):
            raise InputError(
                Code.DATA_INVALID,
                f"{table.source}: column {name!r} has numbers far outside those of training: in "
                f"{count:,} of {len(table):,} rows, and the recipe allows at most a share of "
                f"{share:g} (predict.refuse_outside). Convert the column to the unit of training.",
            )
        sentences.append(
            f"column {name!r} has numbers far outside those of training: in {count:,} of "
            f"{len(table):,} rows; are they in the unit of training?"
        )
    return sentences


def has_student(trained: TrainedRun) -> bool:
    """Returns whether the run trained a student, with which the active party predicts alone."""
    return SOLO in trained.state["models"]


def load_solo(run: Path, name: str) -> TrainedRun:
    """Loads the active party's part of a run with a student.

    Raises InputError if the run has no student, or if ``name`` is a passive party.
    """
    trained = load_trained(run, name)
    if name != trained.recipe.active.name:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--student: {name} is a passive party, and has no labels to learn from. Use "
            f"--student only at {trained.recipe.active.name}.",
        )
    if not has_student(trained):
        raise InputError(
            Code.CONFIG_INVALID,
            f"--student: {trained.path}: the run has trained no student. Add a phase of kind "
            "student to the recipe, and train again.",
        )
    return trained


@dataclass(frozen=True)
class Quality:
    """The values of a metric of the model for sets of participating parties.

    Args:
        metric: The name of the metric, or '' if nothing was measured.
        less: Whether a lower value is better.
        values: {participating parties: value on the rows that all parties have}.
        student: The value for the run's student, or None.
        held: {parties: value on the rows that exactly these parties have}, with ``rows.partial``.
    """

    metric: str = ""
    less: bool = False
    values: Mapping[frozenset[str], float] = field(default_factory=dict)
    student: float | None = None
    held: Mapping[frozenset[str], float] = field(default_factory=dict)

    @property
    def by_party(self) -> bool:
        """Whether the metric was measured for more than one set of parties."""
        return len(self.values) + len(self.held) > 1

    def of(self, parties: Iterable[str]) -> float | None:
        """Returns the metric's value when exactly these parties take part, or None."""
        names = frozenset(parties)
        return self.values.get(names, self.held.get(names))

    def of_holders(self, parties: Iterable[str]) -> float | None:
        """Returns the metric's value on the rows that exactly these parties have.

        If there are no such rows, this is the value when these parties take part, or None.
        """
        names = frozenset(parties)
        return self.held.get(names, self.values.get(names))

    def enough(self, value: float, bound: float) -> bool:
        """Returns whether a value is at least as good as ``bound``."""
        return value <= bound if self.less else value >= bound


def read_quality(run: Path, recipe: Recipe) -> Quality:
    """Reads the quality of a model from the summary in a run's folder.

    Without ``evaluate.subsets`` and ``rows.partial`` it was measured only for all parties together.
    Raises InputError if the summary is damaged.
    """
    path, task = run / "summary.json", recipe.task
    summary = load_summary(path) if path.exists() else None
    if summary is None:
        return Quality()
    worth = summary.worth
    held = _read_by_holders(summary, first_metric(task) if worth is None else worth.metric)
    if worth is None:
        metric, names = (
            first_metric(task),
            [party.name for party in recipe.parties if party.features],
        )
        joint_value = None if held or recipe.own_rows else _read_metric(summary, metric)
        values = {} if joint_value is None else {frozenset(names): joint_value}
        if not values and not held:
            return Quality()
        return Quality(metric, lower_is_better(task, metric), values, held=held)
    # A value on the test rows takes precedence over one on the validation rows.
    measured = {
        frozenset(subset.parties): subset.test if subset.test is not None else subset.validation
        for subset in worth.subsets
    }
    values_by_parties = {names: value for names, value in measured.items() if value is not None}
    student = _read_metric(summary, worth.metric, " student")
    return Quality(
        worth.metric, lower_is_better(task, worth.metric), values_by_parties, student, held
    )


def _read_by_holders(summary: Summary, metric: str) -> dict[frozenset[str], float]:
    """Returns {parties: the metric's value on the rows that exactly these parties have}.

    A value on the test rows replaces the value on the validation rows.
    """
    values: dict[frozenset[str], float] = {}
    for split in ("validation", "test"):
        for name, metrics in summary.metrics.items():
            holders = parse_holders(split, name)
            if holders and metric in metrics and metrics[metric] == metrics[metric]:
                values[frozenset(holders)] = metrics[metric]
    return values


def _read_metric(summary: Summary, metric: str, suffix: str = "") -> float | None:
    """Returns a metric's value on the test rows, or else on the validation rows, or None.

    ``suffix``: The end of a key in the summary's metrics, after the name of the split.
    """
    splits = [f"{split}{suffix}" for split in ("test", "validation")]
    metrics = next((summary.metrics[name] for name in splits if name in summary.metrics), {})
    value = metrics.get(metric)
    return value if value == value else None


def better_alone(value: float | None, quality: Quality, recipe: Recipe, out: Path) -> str:
    """Returns advice if a run of the active party alone is better than the joint model without
    others.

    Returns '' if there is no such run.

    Args:
        value: The metric's value for the joint model when no other party takes part, or None.
        quality: The quality of the joint model, which names the metric.
        recipe: The recipe of the joint model.
        out: The folder of runs.
    """
    active = recipe.active.name
    if value is None:
        return ""
    better: list[tuple[float, str]] = []
    for run in ModelRegistry(out, active).list_trained():
        if not run.alone or run.recipe != recipe.name:
            continue
        try:
            own_value = _read_metric(
                load_summary(out / run.run_id / "summary.json"), quality.metric
            )
        except (OSError, ValidationError):
            continue
        if own_value is not None and own_value != value and quality.enough(own_value, value):
            better.append((-own_value if quality.less else own_value, run.run_id))
    if not better:
        return ""
    best, run_id = max(better)
    return (
        f"without the other parties this model reaches {quality.metric} {value:.4f}, and {active} "
        f"alone {abs(best):.4f} on its own test rows (run {run_id}); score with that run, or train "
        "a student (phase student)"
    )
