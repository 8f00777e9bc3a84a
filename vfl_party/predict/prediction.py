"""Prediction with a trained run.

In a joint prediction all parties compute embeddings of the same rows, and the active party writes
the result. The active party predicts alone if a passive party is unreachable or if the user asks
for it. It then writes the scores of its own model, or a result without scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from vfl_common.bundle import PROTOCOL, Hub, Link, StepKey
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe_tables import PartySettings
from vfl_common.errors import Code, InputError, LostError, VflError
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryPipe
from vfl_common.stages import Job
from vfl_common.summary import ExchangeSummary
from vfl_party.align import AlignedRows
from vfl_party.assembly.models import load_models
from vfl_party.assembly.party import Load, OpenedParty, assemble, expect_rows, open_party
from vfl_party.assembly.party import load as load_rows
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import HeldRows, Rows
from vfl_party.base.step_timing import Clock
from vfl_party.data import Labels, Preprocessor, Table
from vfl_party.data.rows import Prepared
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.chains import PASSIVES, summarize_exchanges
from vfl_party.outbound.declared import Exchange
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Hooks, Party
from vfl_party.phases.exact import blocks_of
from vfl_party.phases.measure import get_threshold
from vfl_party.phases.scoring import SOLO, Scorer, SoloScorer, SplitScorer, scoring
from vfl_party.predict.results import (
    ALONE,
    ELSEWHERE,
    EXPECTED,
    NOBODY,
    PARTIES,
    SCORED,
    SENT,
    WAITING,
    Output,
    Predicted,
    id_names,
    label_name,
    list_all_rows,
    make_key_column,
    meaning,
    result_columns,
)
from vfl_party.predict.run import (
    TrainedRun,
    better_alone,
    has_student,
    load_trained,
    prediction_data,
)

PHASE = "predict"


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
    before = set(party.exchanges.opened)
    if course.scores(party, PHASE) is not None:
        new = [
            party.exchanges.opened.pop(key)
            for key in [*party.exchanges.opened]
            if key not in before
        ]
        return [(exchange_.exchange, exchange_.chains) for exchange_ in new]
    if party.role == "active":
        return []
    exchange = embeddings(party)
    return [(exchange, party.exchanges.make_chains(PHASE, exchange))]


class PassivePredict(Phase):
    """The passive party's phase of a prediction: sends the embeddings of all rows in one round."""

    def __init__(self, party: Party) -> None:
        self.name, self.rounds, self._party = PHASE, 1, party
        self._scorer = scorer(party)

    def run_round(self, round_: int) -> RoundReport:
        self._scorer.answer(self._party.rows.get_joint("all"), StepKey(PHASE, round_, 0))
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
        scored = self._scorer.score(party.rows.get("all"), StepKey(PHASE, round_, 0))
        outputs, table, held_rows = scored.outputs, self._table, scored.by
        holders = party.rows.data.held if held_rows is None else HeldRows({}, held_rows)
        rows, reason = party.rows.get("all"), ELSEWHERE
        if held_rows is not None:
            rows, reason = np.flatnonzero(np.logical_or.reduce([*held_rows.values()])), NOBODY
            outputs, table = party.rows.take(outputs, rows), table.select(rows)
            self._work.tell(
                party, len(rows), describe_own_rows(held_rows, scored.unlisted, party.name)
            )
        if party.rows.data.labels is None:
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"the trained run of {party.name} has no classes. Restore it, or train again.",
            )
        columns = result_columns(
            party.recipe, party.rows.data.labels, outputs, get_threshold(party)
        )
        if self._work.says_parties:
            columns = {
                **self._make_participation_columns(rows, holders, one=held_rows is not None),
                **columns,
            }
        columns = {**make_key_column(party.recipe, table, np.arange(len(table))), **columns}
        result = list_all_rows(self._work.ids, table, columns, self._work.state, reason)
        for output in self._work.outputs:
            output.write(result, self._table.own)
            self._work.written.append(output)
            advise(party.hooks.show, output.advice(result))
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
                    advise(party.hooks.show, better_alone(value, quality, party.recipe, out))
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
    def trained_folder(self) -> Path:
        """The party's folder of the trained run."""
        return self.trained.path

    @property
    def run_id(self) -> str:
        """The id of the trained run."""
        return self.trained.run_id

    def tell(self, party: Party, scored: int, sentences: Sequence[str]) -> None:
        """Stores the number of rows with a score, and shows notes on the result to the user."""
        self.scored.append(scored)
        self.said.extend(sentences)
        for sentence in sentences:
            advise(party.hooks.show, sentence)

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


@dataclass(frozen=True)
class _NoConnections:
    """Implements ``vfl_party.outbound.exchange.Connections`` for a party that predicts alone."""

    hub: Hub | None
    link: Link | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    record: None = None


@dataclass(frozen=True)
class Alone:
    """A model that only the active party needs, and the rows to predict with it."""

    trained: TrainedRun
    opened: OpenedParty
    says_parties: bool = False
    expects: str = ""

    @classmethod
    def load(
        cls,
        run: Path,
        joint: TrainedRun,
        name: str,
        settings: DataSettings | None,
        source: str | None,
        query: str | None,
    ) -> Alone:
        """Loads a local-only baseline or a run with a student, and reads the rows to predict.

        Args:
            run: The folder of the baseline's run, or of the run with a student.
            joint: The run that was trained with the passive parties.
            name: The name of the active party.
            settings: The party file's [data], or None.
            source: Another source instead of the one in ``settings``.
            query: Another query instead of the one in ``settings``.

        Raises InputError if the run was trained for other labels, or with passive parties and
        without a student.
        """
        try:
            trained = load_trained(run, name)
        except InputError as error:
            raise InputError(error.code, f"predict.alone: {error}") from None
        recipe = trained.recipe
        if recipe.passives and not has_student(trained):
            raise InputError(
                Code.CONFIG_INVALID,
                f"predict.alone: {run}: was trained with {recipe.passives[0].name} and without a "
                f"phase of kind student. Give the run of {name} by itself (vfl simulate "
                f"{name}.toml --baseline alone).",
            )
        own_labels, joint_labels = (
            Labels.from_state(trained_run.state["labels"]) for trained_run in (trained, joint)
        )
        if (own_labels.kind, own_labels.classes) != (joint_labels.kind, joint_labels.classes):
            raise InputError(
                Code.CONFIG_INVALID,
                f"predict.alone: {run}: has other labels than {joint.path}. Train it again.",
            )
        alone = cls.open_for(trained, name, prediction_data(settings, source, trained.state, query))
        return replace(alone, says_parties=joint.says_parties, expects=joint.expects)

    @classmethod
    def open_for(
        cls, trained: TrainedRun, name: str, data: DataSettings, load: Load = load_rows
    ) -> Alone:
        """Reads the rows to predict with a trained run.

        ``name``: The name of the active party. ``data``: The settings that ``prediction_data``
        returns. Raises InputError if the rows cannot be read.
        """
        work = _make_work(trained, data, ())
        return cls(trained, open_party(trained.recipe, name, data, trained.encoder, load, work))

    def meaning(self, settings: DataSettings) -> str:
        """Describes the scores of the result in one line.

        ``settings``: The party file's [data], which names the label's column.
        """
        return meaning(Labels.from_state(self.trained.state["labels"]), label_name(settings))

    def write(self, outputs: Sequence[Output], device: torch.device) -> Predicted:
        """Writes the scores of all rows to ``outputs``, and returns the numbers of predicted rows.

        Raises InputError if a result cannot be written.
        """
        opened, recipe = self.opened, self.trained.recipe
        work = replace(
            _make_work(self.trained, opened.settings, outputs),
            says_parties=self.says_parties,
            expects=self.expects,
        )
        party = assemble(replace(opened, work=work), expect_rows(opened), device=device)
        pipe = MemoryPipe(opened.name, ())
        party.connect(
            _NoConnections(ExchangeHub(pipe, timeout_s=recipe.run.step_timeout_s)), Hooks()
        )
        (phase,) = party.phases
        phase.run_round(0)
        return Predicted.of(opened.table, len(opened.table))


def _make_work(trained: TrainedRun, data: DataSettings, outputs: Sequence[Output]) -> Prediction:
    solo = has_student(trained)
    return Prediction(trained, trained.recipe.active, id_names(data), outputs, ALONE, solo)


def is_away(error: VflError) -> bool:
    """Returns whether an error means that the server or a party was unreachable."""
    return isinstance(error, LostError) or error.code is Code.UNREACHABLE


def write_waiting(trained: TrainedRun, table: Table, ids: Sequence[str], output: Output) -> None:
    """Writes a result in which no row has a score. Raises InputError if it cannot be written."""
    labels = Labels.from_state(trained.state["labels"])
    no_outputs = torch.zeros(0, trained.recipe.task.outputs)
    columns: dict[str, Any] = {
        name: pa.nulls(len(table), pa.array(values).type)
        for name, values in result_columns(trained.recipe, labels, no_outputs).items()
    }
    if trained.says_parties:
        participation = {PARTIES: pa.nulls(len(table), pa.string())}
        if trained.expects:
            participation[f"{EXPECTED}{trained.expects}"] = pa.nulls(len(table), pa.float64())
        columns = {**participation, **columns}
    output.write(list_all_rows(ids, table, columns, WAITING), table.own)
