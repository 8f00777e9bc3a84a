"""Joint prediction with a trained run.

All parties compute embeddings of the same rows, and the active party writes the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from torch import nn

from vfl_common.bundle import StepKey
from vfl_common.config.data import DataSettings, without_features
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PartySettings
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder, read_plan
from vfl_common.stages import Job, parse_position
from vfl_common.summary import ExchangeSummary
from vfl_common.text import hide_passwords
from vfl_party.align import AlignedRows
from vfl_party.assembly.models import encoder_settings, load_models
from vfl_party.assembly.party import OpenedParty
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.base.held import HeldRows
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.data import Labels, Preprocessor, Table
from vfl_party.data.join import own_columns
from vfl_party.data.rows import Prepared
from vfl_party.models.row_blocks import Blocks
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.chains import PASSIVES, summarize_exchanges
from vfl_party.outbound.declared import Exchange
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.exact import blocks_of
from vfl_party.phases.measure import get_threshold
from vfl_party.phases.scoring import SOLO, Scorer, SoloScorer, SplitScorer, scoring
from vfl_party.predict.quality import Quality, better_alone, read_quality
from vfl_party.predict.results import (
    ELSEWHERE,
    EXPECTED,
    NOBODY,
    PARTIES,
    SCORED,
    SENT,
    Output,
    Predicted,
    list_all_rows,
    result_columns,
)

PHASE = "predict"


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


def embeddings(party: Party) -> Exchange:
    """Declares the exchange that sends the embeddings of the rows to predict.

    The embeddings get the same noise as in the phases of training.
    """
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


def scorer(party: Party) -> Scorer:
    """Opens a party's side of the joint prediction.

    This is the scorer of the recipe's method, or the scorer for encoders and a top model. Raises
    InputError if the method cannot predict.
    """
    method_scorer = party.course.scores(party, PHASE)
    return (
        method_scorer if method_scorer is not None else SplitScorer(party, PHASE, embeddings(party))
    )


def plan_exchanges(party: Party) -> list[ExchangeSummary]:
    """Summarizes the messages that a party would send in a prediction with the trained model."""
    lines = [
        line
        for exchange, chains in exchanges_of(party)
        for line in summarize_exchanges(party.recipe, PHASE, exchange, chains, after_labels=True)
    ]
    own_sender = party.name if party.role == "active" else PASSIVES
    return [line for line in lines if line.sender == own_sender]


def exchanges_of(party: Party) -> list[tuple[Exchange, Chains]]:
    """Returns the exchanges in which a party would send values in a later prediction.

    ``party``: A party during training. The result has each exchange with its chains of transforms
    and guards.
    """
    course = party.course
    if course.keeps_nothing is not None:
        return []
    if party.recipe.own_rows and not course.scores_own_rows:
        return []
    before = set(party.exchanges)
    if course.scores(party, PHASE) is not None:
        new = [party.exchanges.pop(key) for key in [*party.exchanges] if key not in before]
        return [(exchange_.exchange, exchange_.chains) for exchange_ in new]
    if party.role == "active":
        return []
    exchange = embeddings(party)
    return [(exchange, party.chains(PHASE, exchange))]


class PassivePredict(Phase):
    """The passive party's phase of a prediction: sends the embeddings of all rows in one round."""

    def __init__(self, party: Party) -> None:
        self.name, self.rounds, self._party = PHASE, 1, party
        self._scorer = scorer(party)

    def run_round(self, round_: int) -> RoundReport:
        self._scorer.answer(self._party.joint_rows("all"), StepKey(PHASE, round_, 0))
        return RoundReport(0)


class ActivePredict(Phase):
    """The active party's phase of a prediction: writes ids and scores of all rows in one round.

    ``work``: The prediction, which names the files to write.
    """

    def __init__(self, party: Party, work: Prediction, table: Table) -> None:
        self.name, self.rounds, self._party = PHASE, 1, party
        self._work, self._table = work, table
        self._scorer: Scorer = SoloScorer(party, party.models[SOLO]) if work.solo else scorer(party)

    def run_round(self, round_: int) -> RoundReport:
        party = self._party
        scored = self._scorer.score(party.rows("all"), StepKey(PHASE, round_, 0))
        outputs, table, held_rows = scored.outputs, self._table, scored.by
        holders = party.data.held if held_rows is None else HeldRows({}, held_rows)
        rows, reason = party.rows("all"), ELSEWHERE
        if held_rows is not None:
            rows, reason = np.flatnonzero(np.logical_or.reduce([*held_rows.values()])), NOBODY
            outputs, table = party.take(outputs, rows), table.select(rows)
            self._work.tell(
                party, len(rows), describe_own_rows(held_rows, scored.unlisted, party.name)
            )
        if party.data.labels is None:
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"the trained run of {party.name} has no classes. Restore it, or train again.",
            )
        columns = result_columns(party.recipe, party.data.labels, outputs, get_threshold(party))
        if self._work.says_parties:
            columns = {
                **self._make_participation_columns(rows, holders, one=held_rows is not None),
                **columns,
            }
        result = list_all_rows(self._work.ids, table, columns, self._work.state, reason)
        for output in self._work.outputs:
            output.write(result, self._table.own)
            self._work.written.append(output)
            advise(party.show, output.advice(result))
        return RoundReport(0)

    def _make_participation_columns(
        self, rows: Rows, held: HeldRows | None, *, one: bool
    ) -> dict[str, Any]:
        """Returns the columns with the participating parties and the expected metric of each row.

        Args:
            rows: The rows of the result.
            held: The rows that each party has. None if all parties have all rows.
            one: Whether only the first party that has a row scores it.
        """
        party = self._party
        scoring_parties = [party.recipe.active] if self._work.solo else party.recipe.parties
        names = [party_.name for party_ in scoring_parties if party_.features]
        groups = [(tuple(names), np.arange(len(rows)))]
        if held is not None and not self._work.solo:
            groups = held.by_holders(rows)
        quality, metric = self._work.trained.quality, self._work.expects
        parties, expected = np.empty(len(rows), object), np.empty(len(rows), object)
        for holders, indices in groups:
            participants = [name for name in names if name in holders or name == party.name]
            parties[indices] = ", ".join(participants[:1] if one else participants)
            if metric == quality.metric:
                value = quality.student if self._work.solo else quality.of_holders(participants)
                expected[indices] = value
                if participants == [party.name] and not one:
                    out = self._work.trained.path.parent.parent
                    advise(party.show, better_alone(value, quality, party.recipe, out))
        metric_column = {f"{EXPECTED}{metric}": pa.array(expected, pa.float64())} if metric else {}
        return {PARTIES: parties.tolist(), **metric_column}


def describe_own_rows(
    held_rows: Mapping[str, npt.NDArray[np.bool_]], unlisted: Mapping[str, int], active: str
) -> list[str]:
    """Returns notes on a result of rows of which each party has different ones.

    Args:
        by: {party: bool [N], whether the party has each row}.
        unlisted: {party: number of its rows whose ids the active party does not ask for}.
        active: The name of the active party.
    """
    several = int((np.sum([*held_rows.values()], axis=0) > 1).sum())
    overlaps = [
        f"{several:,} ids are at several parties; the first of {', '.join(held_rows)} that has "
        "such an id scored it"
    ]
    without_score = [
        f"{name} has {count:,} rows whose ids {active} does not ask for; these rows have no score"
        for name, count in unlisted.items()
        if count
    ]
    return [*(overlaps if several else []), *without_score]


@dataclass(frozen=True)
class Prediction:
    """The joint prediction of new rows, a kind of ``vfl_party.assembly.party.Work``.

    Args:
        trained: The party's part of the trained run.
        settings: The party's settings in the recipe.
        ids: The names of the id columns.
        outputs: The files that the active party writes.
        state: The value of the column ``state`` for rows that have a score.
        solo: Whether the active party predicts alone, with the run's student.
        says_parties: Whether the result names the parties that took part in each score.
        expects: The metric whose expected value the result has, or '' for none.
        written: The files that have been written.
        scored: The number of rows with a score, if the parties have different rows.
        said: Notes on the result.
        by: A description of the parties that have the rows.
    """

    trained: TrainedRun
    settings: PartySettings
    ids: Sequence[str]
    outputs: Sequence[Output]
    state: str = SCORED
    solo: bool = False
    says_parties: bool = False
    expects: str = ""
    written: list[Output] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    by: list[str] = field(default_factory=list)

    job: ClassVar[Job] = "predict"

    @property
    def run_id(self) -> str:
        """The id of the trained run."""
        return self.trained.run_id

    def tell(self, party: Party, scored: int, sentences: Sequence[str]) -> None:
        """Stores the number of rows with a score, and shows notes on the result to the user."""
        self.scored.append(scored)
        self.said.extend(sentences)
        for sentence in sentences:
            advise(party.show, sentence)

    def count_rows(self, table: Table, common: int) -> Predicted:
        """Counts the predicted rows of a party's table.

        ``common``: The number of the table's rows that all or some other parties have.
        """
        if not self.trained.recipe.own_rows:
            return replace(Predicted.of(table, common), by=self.by[-1] if self.by else "")
        if self.settings.role == "passive":
            return Predicted.of(table, len(table), state=SENT)
        return replace(Predicted.of(table, self.scored[-1]), others=NOBODY)

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Prepares the rows with the statistics and classes of training.

        Raises InputError if the columns differ from those of training.
        """
        table, state = aligned.of(opened.table), self.trained.state
        self.by[:] = [aligned.by(opened.name, self.trained.recipe.active.name)]
        preprocessor = (
            Preprocessor.from_state(state["preprocessor"]) if state["preprocessor"] else None
        )
        has_features = self.settings.features and preprocessor is not None
        return Prepared(
            table=table,
            preprocessor=preprocessor,
            features=preprocessor.transform(table)
            if has_features and preprocessor is not None
            else None,
            labels=Labels.from_state(state["labels"]) if state["labels"] else None,
            targets=None,
            splits={"all": np.arange(len(table.ids), dtype=np.int64)},
        )

    def begin(self, models: dict[str, nn.Module]) -> None:
        """Loads the trained weights into ``models``."""
        load_models(models, self.trained.state)

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Returns the one phase of this party in a prediction."""
        self.prepare_scoring(party)
        if party.role == "passive":
            return [PassivePredict(party)]
        return [ActivePredict(party, self, prepared.table)]

    def prepare_scoring(self, party: Party) -> None:
        """Sets the party's decision threshold and the blocks in which its models compute rows.

        The blocks are those in which scores do not depend on other rows on this machine.
        """
        # A run of an earlier version has no threshold.
        party.scores.threshold = self.trained.state.get("threshold")
        if not self.trained.blocks:
            self.trained.blocks.update(blocks_of(party))
        party.scores.blocks = self.trained.blocks
