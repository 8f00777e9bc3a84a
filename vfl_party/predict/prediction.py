"""Joint prediction with a trained run: all parties embed the same rows, the active party writes the
result.
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
from vfl_common.config.data import DataSettings, ids_only
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PartySettings
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.run_folder import RunFolder, read_plan
from vfl_common.stages import Job, position_of
from vfl_common.summary import ExchangeSummary
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
from vfl_party.phases.measure import decides
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
    """A finished run as one party holds it.

    ``encoder``: the settings of the party's encoder. ``state``: what its job's ``state`` returned
    at the end. ``path``: the party's folder of it. ``plugins``: names and versions of the plug-ins
    with which the party began it. ``blocks``: see ``Scores.blocks``; empty until the models are
    checked.
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
        """Whether a result names who took part: the model can do without some."""
        recipe = self.recipe
        return (
            recipe.modelled != recipe.parties
            or recipe.rows.partial
            or recipe.own_rows
            or Course(recipe).learns != ""
        )

    @cached_property
    def quality(self) -> Quality:
        """What was measured of the model, by the parties that take part. Raises InputError."""
        return read_quality(self.path.parent, self.recipe)

    @property
    def expects(self) -> str:
        """The metric that a result shows with the parties that took part; '' for none."""
        return self.quality.metric if self.says_parties and self.quality.by_party else ""


def load_trained(run: Path, name: str) -> TrainedRun:
    """Loads the run in ``<out>/<run id>``, or in the party's own folder in it. Raises
    InputError.
    """
    path = run if run.name == name and (run / "run.json").exists() else run / name
    if not (path / "run.json").exists():
        raise InputError(
            Code.FILE_INVALID, f"{run}: holds no run of {name}. Give the folder <out>/<run id>."
        )
    folder = RunFolder(path, path.resolve().parent.name)
    if not folder.facts().get("trained"):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{path}: this run was not finished. Finish it, or give another.",
        )
    recipe = folder.recipe()
    left = Course(recipe).keeps_nothing
    if left is not None:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{path}: its phase {left} keeps no model. Give a run of another method.",
        )
    store = CheckpointStore(path / "checkpoints", keep=2)
    labels = store.labels()
    if not labels:
        raise InputError(
            Code.CHECKPOINT_INVALID, f"{path}: has no checkpoints. Restore them, or train again."
        )
    if position_of(labels[-1]) < sum(phase.rounds for phase in read_plan(folder)):
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
    """Loads a run to predict with, as ``load_trained``, and leaves parties out of its recipe.

    Raises InputError, also if no row has parts at all parties, or if the model has not learnt to do
    without a party.
    """
    trained = load_trained(run, name)
    course = Course(trained.recipe)
    if trained.recipe.own_rows and not course.scores_own_rows:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{trained.path}: its parties hold different rows, and it has no head that scores them."
            " Add a phase of kind probe without hidden, or export the models of each party "
            "(vfl export model).",
        )
    if not without:
        return trained
    if name in without:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--without {name}: {name} itself predicts here. Start only the other parties.",
        )
    if course.without == "wait" and not trained.recipe.own_rows:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--without {', '.join(without)}: the model of {trained.path} has not learnt to do "
            "without a party. Train it with subsets or party_dropout in its phase splitnn or head.",
        )
    return replace(trained, recipe=trained.recipe.without(without))


def encoder_of(folder: RunFolder, recipe: Recipe, name: str) -> EncoderSettings:
    """Returns the settings of the party's encoder: its own, if the folder notes one, else the
    recipe's.
    """
    noted = folder.facts().get("encoder")
    try:
        own = TypeAdapter(EncoderSettings).validate_python(noted) if noted is not None else None
    except ValidationError:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder.path / 'run.json'}: its encoder cannot be read. Restore the file.",
        ) from None
    return encoder_settings(recipe, name, own)


def load_start(recipe: Recipe, name: str, out: Path) -> TrainedRun | None:
    """Loads the run that the recipe starts from, from ``name``'s folder of runs; None if it has
    none to start from.

    Raises InputError if the run is missing or not finished.
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
    """Returns the party file's [data] with another source or query. Raises InputError if there is
    no [data].

    A table is read with the columns of training only: new rows need no label and may have more
    columns. ``source``: as in a party file; a relative path starts at the working folder.
    """
    if settings is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "data: the party file needs this table to know which column is the id. Add [data].",
        )
    changed = _apply_source(settings, source, query)
    if state["preprocessor"] is None:
        return ids_only(changed)
    preprocessor = Preprocessor.from_state(state["preprocessor"])
    changed = changed.copy_layout_of(preprocessor.style)
    if settings.parts:
        return _parts_of_training(settings, source, preprocessor)
    if changed.is_table and preprocessor.image_shape is None and settings.view is None:
        return _as_in_training(changed, preprocessor.numeric_names, preprocessor.categorical_names)
    return changed


def _apply_source(settings: DataSettings, source: str | None, query: str | None) -> DataSettings:
    """Returns the settings with another source or query, None for those of training. Raises
    InputError.
    """
    changes: dict[str, Any] = {} if query is None else {"query": query}
    if source is not None:
        changes["source"] = DataSettings(source=source).absolute(Path()).source
    changed = settings.model_copy(update=changes)
    if query is not None and not changed.is_database:
        raise InputError(
            Code.CONFIG_INVALID,
            "--query: is for a database. Remove it, or give --data such as "
            "postgresql://USER@HOST/NAME.",
        )
    if source is not None and changed.is_database and changed.query is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--data {hide_passwords(changed.source)}: is a database, and the party file has no "
            "query. Give the SELECT whose rows are to be predicted with --query.",
        )
    return changed


def _as_in_training(
    settings: DataSettings, numeric: tuple[str, ...], categorical: tuple[str, ...]
) -> DataSettings:
    """Returns a table's settings with the columns of training alone, each of the kind that it had
    there.
    """
    kinds = {"columns": (*numeric, *categorical), "numeric": numeric, "categorical": categorical}
    return settings.model_copy(update={"label": None, "drop": (), "as_trained": True, **kinds})


def _parts_of_training(
    settings: DataSettings, source: str | None, preprocessor: Preprocessor
) -> DataSettings:
    """Returns the settings of joined tables, of which each is read with its columns of training."""
    if source is not None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--data {hide_passwords(source)}: this party was trained on the joined tables of "
            "several parties, and one file cannot replace them. Predict from Python, with "
            "Run.predict.",
        )
    kinds = (preprocessor.numeric_names, preprocessor.categorical_names)
    parts = {
        name: _as_in_training(part, *(own_columns(names, settings, name) for names in kinds))
        if part.is_table and part.view is None
        else part
        for name, part in settings.parts.items()
    }
    return settings.model_copy(update={"parts": parts})


def unseen(trained: TrainedRun, table: Table) -> list[str]:
    """Returns a sentence for each column of rows to predict that holds what training never had;
    they show no value.

    That is categories, and numbers far outside those of training.

    Raises InputError if the table lacks a column of training, or if more of a column's numbers are
    outside than ``predict.refuse_outside`` of the recipe allows.
    """
    if trained.state["preprocessor"] is None:
        return []
    preprocessor = Preprocessor.from_state(trained.state["preprocessor"])
    sentences = [
        f"column {name!r} has categories that training never had, so the model knows nothing of "
        f"them: in {count:,} of {len(table):,} rows"
        for name, count in preprocessor.unseen(table).items()
    ]
    share = trained.recipe.predict.refuse_outside
    for name, count in preprocessor.outside(table).items():
        if share is not None and count > share * len(table):
            raise InputError(
                Code.DATA_INVALID,
                f"{table.source}: column {name!r} has numbers far outside those of training: in "
                f"{count:,} of {len(table):,} rows, and the recipe allows at most a share of "
                f"{share:g} (predict.refuse_outside). Give them in the unit of training.",
            )
        sentences.append(
            f"column {name!r} has numbers far outside those of training: in {count:,} of "
            f"{len(table):,} rows; are they in the unit of training?"
        )
    return sentences


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of the rows to predict, with the noise that the phases of training ask
    for.
    """
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


def scorer(party: Party) -> Scorer:
    """Opens a party's side of the joint prediction: its method's own, or that of encoders and a top
    model. Raises InputError.
    """
    own = party.course.scores(party, PHASE)
    return own if own is not None else SplitScorer(party, PHASE, embeddings(party))


def plan_exchanges(party: Party) -> list[ExchangeSummary]:
    """Returns what a party would send for a prediction with the trained model; empty if it would
    send nothing.
    """
    lines = [
        line
        for exchange, chains in exchanges_of(party)
        for line in summarize_exchanges(party.recipe, PHASE, exchange, chains, after_labels=True)
    ]
    mine = party.name if party.role == "active" else PASSIVES
    return [line for line in lines if line.sender == mine]


def exchanges_of(party: Party) -> list[tuple[Exchange, Chains]]:
    """Returns the exchanges of a prediction with the trained model, of a party that trains; empty
    if the party would send nothing.
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
    """Sends the embeddings of all rows, in one round."""

    def __init__(self, party: Party) -> None:
        self.name, self.rounds, self._party = PHASE, 1, party
        self._scorer = scorer(party)

    def run_round(self, round_: int) -> RoundReport:
        self._scorer.answer(self._party.joint_rows("all"), StepKey(PHASE, round_, 0))
        return RoundReport(0)


class ActivePredict(Phase):
    """Writes the scores of all rows, with the rows' ids, in one round. ``work``: says where."""

    def __init__(self, party: Party, work: Prediction, table: Table) -> None:
        self.name, self.rounds, self._party = PHASE, 1, party
        self._work, self._table = work, table
        self._scorer: Scorer = SoloScorer(party, party.models[SOLO]) if work.solo else scorer(party)

    def run_round(self, round_: int) -> RoundReport:
        party = self._party
        scored = self._scorer.score(party.rows("all"), StepKey(PHASE, round_, 0))
        outputs, table, by = scored.outputs, self._table, scored.by
        holders = party.data.held if by is None else HeldRows({}, by)
        rows, nobody = party.rows("all"), ELSEWHERE
        if by is not None:
            rows, nobody = np.flatnonzero(np.logical_or.reduce([*by.values()])), NOBODY
            outputs, table = party.take(outputs, rows), table.select(rows)
            self._work.tell(party, len(rows), own_rows_said(by, scored.unlisted, party.name))
        if party.data.labels is None:
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"the trained run of {party.name} has no classes. Restore it, or train again.",
            )
        columns = result_columns(party.recipe, party.data.labels, outputs, decides(party))
        if self._work.says_parties:
            columns = {
                **self._make_participation_columns(rows, holders, one=by is not None),
                **columns,
            }
        result = list_all_rows(self._work.ids, table, columns, self._work.state, nobody)
        for output in self._work.outputs:
            output.write(result, self._table.own)
            self._work.written.append(output)
            advise(party.show, output.advice(result))
        return RoundReport(0)

    def _make_participation_columns(
        self, rows: Rows, held: HeldRows | None, *, one: bool
    ) -> dict[str, Any]:
        """Returns columns for rows: who took part, and what was measured of such rows.

        ``held``: who holds which row; None if all hold all. ``one``: whether the first of those
        who hold a row scores it alone.
        """
        party = self._party
        of = [party.recipe.active] if self._work.solo else party.recipe.parties
        names = [party_.name for party_ in of if party_.features]
        groups = [(tuple(names), np.arange(len(rows)))]
        if held is not None and not self._work.solo:
            groups = held.by_holders(rows)
        quality, metric = self._work.trained.quality, self._work.expects
        parties, expected = np.empty(len(rows), object), np.empty(len(rows), object)
        for others, at in groups:
            there = [name for name in names if name in others or name == party.name]
            parties[at] = ", ".join(there[:1] if one else there)
            if metric == quality.metric:
                value = quality.student if self._work.solo else quality.of_holders(there)
                expected[at] = value
                if there == [party.name] and not one:
                    out = self._work.trained.path.parent.parent
                    advise(party.show, better_alone(value, quality, party.recipe, out))
        of_metric = {f"{EXPECTED}{metric}": pa.array(expected, pa.float64())} if metric else {}
        return {PARTIES: parties.tolist(), **of_metric}


def own_rows_said(
    by: Mapping[str, npt.NDArray[np.bool_]], unlisted: Mapping[str, int], active: str
) -> list[str]:
    """Returns sentences about a result of rows that different parties hold: ids that several
    parties know, and rows without a score. ``by``, ``unlisted``: see ``Scored``.
    """
    several = int((np.sum([*by.values()], axis=0) > 1).sum())
    overlaps = [
        f"{several:,} ids are at several parties; of each, the first of {', '.join(by)} has "
        "scored it"
    ]
    more = [
        f"{name} has {count:,} rows whose ids {active} does not ask for; they have no score"
        for name, count in unlisted.items()
        if count
    ]
    return [*(overlaps if several else []), *more]


@dataclass(frozen=True)
class Prediction:
    """See ``vfl_party.assembly.party.Work``: the joint prediction of new rows with a trained run.

    ``settings``: the party's, from the recipe. ``ids``: the names of the id columns. ``outputs``:
    the files that the active party writes. ``state``: of the rows that have a score. ``solo``:
    whether the active party scores by itself, with the run's student. ``says_parties``: whether
    they name who took part; ``expects``: the metric that they then tell, '' for none. ``written``:
    the files that are written already. ``scored``: how many rows have a score, once that is known,
    if the parties hold different rows; ``said``: sentences about the result; ``by``: who holds the
    rows, in words.
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
        """Notes how many rows have a score, and shows sentences about the result."""
        self.scored.append(scored)
        self.said.extend(sentences)
        for sentence in sentences:
            advise(party.show, sentence)

    def count_rows(self, table: Table, common: int) -> Predicted:
        """Counts the rows of a party's table that are predicted. ``common``: those that all hold,
        or that some others do.
        """
        if not self.trained.recipe.own_rows:
            return replace(Predicted.of(table, common), by=self.by[-1] if self.by else "")
        if self.settings.role == "passive":
            return Predicted.of(table, len(table), state=SENT)
        return replace(Predicted.of(table, self.scored[-1]), others=NOBODY)

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Returns the rows, with the statistics and classes of training. Raises InputError if
        columns differ.
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
        """Loads the trained weights."""
        load_models(models, self.trained.state)

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Returns the one phase of the party's side."""
        self.prepare_scoring(party)
        if party.role == "passive":
            return [PassivePredict(party)]
        return [ActivePredict(party, self, prepared.table)]

    def prepare_scoring(self, party: Party) -> None:
        """Gives a party what it scores rows with: the run's threshold, and the blocks that its
        models' check on this machine has chosen.
        """
        # A run of an earlier version has no threshold.
        party.scores.threshold = self.trained.state.get("threshold")
        if not self.trained.blocks:
            self.trained.blocks.update(blocks_of(party))
        party.scores.blocks = self.trained.blocks
