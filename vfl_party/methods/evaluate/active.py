"""The active party's side: collects the embeddings of all rows and computes the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.summary import name_holders
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.evaluate import importance
from vfl_party.methods.evaluate.exchanges import embeddings
from vfl_party.methods.evaluate.quality import MetricJudge, select_metric
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.methods.evaluate.subsets import Subsets
from vfl_party.methods.evaluate.telling import MetricsSender, count_metrics_steps
from vfl_party.phases import stand_in
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import Chunk, SplitScorer


class ActiveEvaluate(Phase):
    """Evaluates all splits, one after the other, in one round. It also evaluates the model without
    each party that may be absent, and with each set of parties if the recipe sets ``subsets``.
    """

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party, settings))
        self._folder: Path | None = None
        self._sender = MetricsSender(party, name, settings.splits)
        self._subsets: Subsets | None = None
        if settings.subsets:
            self._subsets = Subsets(party, name, settings, self._scorer)
        self._writer = importance.ImportanceWriter(party, name, settings)
        self._importance = (
            importance.ActiveImportance(party, name, settings, self._scorer.answering)
            if settings.importance
            else None
        )

    def keep(self, folder: Path) -> None:
        self._writer.folder = folder
        self._folder = folder

    def run_round(self, round_: int) -> RoundReport:
        party, batch = self._party, 0
        embedded: dict[str, tuple[Rows, list[Chunk]]] = {}
        for split in self._settings.splits:
            rows = party.rows(split)
            chunks = [*self._scorer.embeddings(rows, StepKey(self.name, round_, batch))]
            batch += len(chunks)
            if len(rows):
                embedded[split] = rows, chunks
        predictions = self._predict_splits(embedded)
        # Metrics come first, because the recipe may have the decision threshold chosen by them.
        metrics = add_row_counts(party, compute_metrics(party, predictions), predictions)
        self._sender.send(StepKey(self.name, round_, batch), metrics)
        batch += count_metrics_steps(party)
        absent: dict[str, Tensor] = {}
        if self._subsets is not None:
            step, kind = StepKey(self.name, round_, batch), self._settings.absent
            absent = stand_in.collect(self._scorer.answering, party, kind, step)
            batch += stand_in.count_steps(kind)
            if self._folder is not None:
                stand_in.keep(self._folder, absent)
        if self._importance is not None:
            first = StepKey(self.name, round_, batch)
            self._measure_columns(self._importance, first, *embedded["validation"])
        # Sets of parties come last, because they take longest and do not need the other parties.
        worth, note = None, ""
        if self._subsets is not None:
            common_rows = {
                split: select_common(*rows_and_chunks)
                for split, rows_and_chunks in embedded.items()
            }
            if all(len(common_rows[split][0]) for split in self._subsets.splits):
                worth = self._subsets.measure(common_rows, absent)
            else:
                note = (
                    f"{self.name}: sets of parties are not measured, because the parties have no "
                    "evaluation row in common"
                )
        return RoundReport(0, metrics, predictions=predictions, worth=worth, note=note)

    def _measure_columns(
        self,
        column_importance: importance.ActiveImportance,
        first: StepKey,
        rows: Rows,
        chunks: list[Chunk],
    ) -> None:
        party, settings = self._party, self._settings
        metric = select_metric(party.recipe.task, self.name, settings.metric)
        judge = MetricJudge(party, metric, rows)
        baseline = judge.measure(self._scorer.scored(chunks).outputs)
        ranking = column_importance.run(
            first,
            chunks,
            lambda permuted: baseline - judge.measure(self._scorer.scored(permuted).outputs),
        )
        if ranking is not None:
            self._writer(ranking)

    def _predict_splits(
        self, embedded: dict[str, tuple[Rows, list[Chunk]]]
    ) -> dict[str, tuple[Rows, Tensor]]:
        party = self._party
        # If training may continue without a party, the report also contains the quality without
        # that party.
        can_leave_out = party.features is not None or len(party.recipe.passives) > 1
        # With partial rows, only one party may hold a row, and the row cannot be scored without
        # that party.
        can_leave_out = can_leave_out and (party.features is not None or party.data.held is None)
        left_out = (
            [passive.name for passive in party.recipe.passives]
            if party.course.without != "wait" and can_leave_out
            else []
        )
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        for split, (rows, chunks) in embedded.items():
            variants = {split: chunks} | {
                f"{split} without {name}": [chunk.without(name) for chunk in chunks]
                for name in left_out
            }
            for name, variant in variants.items():
                predictions[name] = rows, self._scorer.scored(variant).outputs
            predictions |= divide_by_holders(party, split, *predictions[split])
        return predictions


# The name of the metric that gives the number of rows of a group.
ROWS = "rows"


def divide_by_holders(
    party: Party, split: str, rows: Rows, outputs: Tensor
) -> dict[str, tuple[Rows, Tensor]]:
    """Returns {name of a group: (the group's rows, their outputs [N, O])}; empty if all parties
    hold all rows.

    A group's name lists the parties that hold its rows and have features.
    """
    held_rows = party.data.held
    if held_rows is None:
        return {}
    own_name = () if party.features is None else (party.name,)
    return {
        name_holders(split, (*own_name, *names)): (rows[places], party.take(outputs, places))
        for names, places in held_rows.by_holders(rows)
    }


def select_common(rows: Rows, chunks: Sequence[Chunk]) -> tuple[Rows, list[Chunk]]:
    """Returns the rows that all parties hold, and their embeddings. ``chunks``: the embeddings of
    ``rows``, in order.
    """
    common, common_chunks, start = [], list[Chunk](), 0
    for chunk in chunks:
        for part, places in chunk.by_holders():
            if all(z is not None for z in part.others.values()):
                common.append(rows[start + places])
                common_chunks.append(part)
        start += chunk.rows
    return np.concatenate(common) if common else rows[:0], common_chunks


def add_row_counts(
    party: Party,
    metrics: dict[str, dict[str, float]],
    predictions: Mapping[str, tuple[Rows, Tensor]],
) -> dict[str, dict[str, float]]:
    """Adds the number of rows to the metrics of each split and group of rows, unless all parties
    hold all rows.
    """
    if party.data.held is None:
        return metrics
    return {
        name: {**values, ROWS: float(len(predictions[name][0]))} for name, values in metrics.items()
    }
