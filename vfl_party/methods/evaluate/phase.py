"""Both sides of an evaluation. The passive parties send the embeddings of the rows of all splits,
and the active party computes the outputs. At the end, it sends the metrics that the recipe names to
the passive parties.

Metrics are sent as the bytes of float64 numbers, which codecs and transforms leave unchanged. An
undefined metric is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.files import private_file
from vfl_common.summary import name_holders, name_key
from vfl_common.text import to_json
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.evaluate import importance
from vfl_party.methods.evaluate.settings import EvaluateSettings, select_metric
from vfl_party.methods.evaluate.subsets import MetricJudge, Subsets
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, Traffic, u8
from vfl_party.phases import stand_in
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import Chunk, SplitScorer, scoring, scoring_traffic, split_into_chunks

# The file in a passive party's run folder with {split: {metric: value}}.
FILE = "told.json"
_NUMBER = np.dtype("<f8")


def metrics_exchange(party: Party) -> Exchange | None:
    """Declares the exchange of the metrics that the active party sends to the passive parties; None
    if it sends no metrics.
    """
    names = party.recipe.report.tell_passives
    if not names or not party.recipe.passives:
        return None
    tensors = {"metrics": u8("splits", "metrics", _NUMBER.itemsize)}
    down = Sent(Kind.VERDICT, tensors, how=f"float64 of {', '.join(names)}")
    return Exchange("told", NOTHING, down, when="once")


def count_metrics_steps(party: Party) -> int:
    """Returns the number of steps in which metrics are sent, 0 or 1."""
    return int(metrics_exchange(party) is not None)


def metrics_traffic(party: Party, step: StepKey, splits: Sequence[str]) -> list[Occurrence]:
    """Returns the exchange at the step after the last embeddings, if metrics are sent."""
    exchange = metrics_exchange(party)
    return [] if exchange is None else [Occurrence.of(exchange, step, **_get_sizes(party, splits))]


def _get_sizes(party: Party, splits: Sequence[str]) -> dict[str, int]:
    return {"splits": len(splits), "metrics": len(party.recipe.report.tell_passives)}


class MetricsSender:
    """The active party's side, which sends the metrics."""

    def __init__(self, party: Party, phase: str, splits: Sequence[str]) -> None:
        self._splits, self._names = splits, party.recipe.report.tell_passives
        exchange = metrics_exchange(party)
        self._side = None
        if exchange is not None:
            self._side = party.exchanges.open_answering(
                phase, exchange, **_get_sizes(party, splits)
            )

    def send(self, step: StepKey, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Sends the metrics to all passive parties, if the recipe enables this."""
        if self._side is None:
            return
        values = [
            [metrics.get(split, {}).get(name, np.nan) for name in self._names]
            for split in self._splits
        ]
        content = np.array(values, _NUMBER)[..., None].view(np.uint8)
        parties = self._side.collect(step)
        self._side.reply_all(step, parties, {"metrics": torch.from_numpy(content.copy())})


class MetricsReceiver:
    """A passive party's side, which writes the received metrics to a file in its run folder."""

    def __init__(self, party: Party, phase: str, splits: Sequence[str]) -> None:
        self._splits, self._names = splits, party.recipe.report.tell_passives
        self._folder: Path | None = None
        exchange = metrics_exchange(party)
        self._side = None
        if exchange is not None:
            self._side = party.exchanges.open_asking(phase, exchange, **_get_sizes(party, splits))

    def keep(self, folder: Path) -> None:
        """Sets the party's run folder."""
        self._folder = folder

    def receive(self, step: StepKey) -> None:
        """Receives the metrics, if the recipe has them sent."""
        if self._side is None:
            return
        content = self._side.swap(step, {})["metrics"].cpu().numpy()
        values = np.ascontiguousarray(content).view(_NUMBER)[..., 0].tolist()
        metrics = {
            split: {
                name: value for name, value in zip(self._names, row, strict=True) if value == value
            }
            for split, row in zip(self._splits, values, strict=True)
        }
        if self._folder is not None:
            with private_file(self._folder / FILE) as file:
                file.write(
                    (to_json({split: row for split, row in metrics.items() if row}) + "\n").encode()
                )


def embeddings(party: Party, settings: EvaluateSettings) -> Exchange:
    """Declares the exchange of embeddings, with the noise of the earlier phases: embeddings of the
    rows of each split, the mean embedding that replaces an absent party, and the embeddings with
    permuted columns.
    """
    course = party.course
    exchange = scoring(course.sent_noise, name="embedding", when="once", how=course.protected)
    later = ""
    if settings.subsets and settings.absent == "mean":
        later = "; then the mean of the training rows, as one row"
    if settings.importance:
        later += "; then the validation rows with each column permuted"
    return replace(exchange, when=exchange.when + later)


def traffic(party: Party, phase: str, settings: EvaluateSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    occurrences: list[Occurrence] = []
    exchange, batch = embeddings(party, settings), 0
    for split in settings.splits:
        rows = party.rows.get_joint(split)
        occurrences += scoring_traffic(party, phase, exchange, 0, batch, rows)
        batch += len(split_into_chunks(rows))
    occurrences += metrics_traffic(party, StepKey(phase, 0, batch), settings.splits)
    batch += count_metrics_steps(party)
    if settings.subsets:
        means = stand_in.traffic(party, exchange, settings.absent, StepKey(phase, 0, batch))
        occurrences += means
        batch += stand_in.count_steps(settings.absent)
    if not settings.importance:
        return Traffic(occurrences, bound=party.exchanges.bound)
    permuted, uncounted = importance.traffic(party, exchange, settings, StepKey(phase, 0, batch))
    bound = (
        f"the permuted columns of {', '.join(uncounted)} are not counted, because this party does "
        "not have them"
    )
    return Traffic([*occurrences, *permuted], bound=bound if uncounted else "")


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
            rows = party.rows.get(split)
            chunks = [*self._scorer.embeddings(rows, StepKey(self.name, round_, batch))]
            batch += len(chunks)
            if len(rows):
                embedded[split] = rows, chunks
        predictions = self._predict_splits(embedded)
        # Metrics come first, because the recipe may have the decision threshold chosen by them.
        groups = dict(predictions)
        for name in embedded:
            groups |= divide_by_key(party, name, *predictions[name])
        metrics = add_row_counts(party, compute_metrics(party, groups), groups)
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
        can_leave_out = party.rows.features is not None or len(party.recipe.passives) > 1
        # With partial rows, only one party may hold a row, and the row cannot be scored without
        # that party.
        can_leave_out = can_leave_out and (
            party.rows.features is not None or party.rows.data.held is None
        )
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
    held_rows = party.rows.data.held
    if held_rows is None:
        return {}
    own_name = () if party.rows.features is None else (party.name,)
    return {
        name_holders(split, (*own_name, *names)): (rows[places], party.rows.take(outputs, places))
        for names, places in held_rows.by_holders(rows)
    }


def divide_by_key(
    party: Party, split: str, rows: Rows, outputs: Tensor
) -> dict[str, tuple[Rows, Tensor]]:
    """Returns {name of a key: (the rows that it matched, their outputs [N, O])}.

    Returns {} if the recipe has at most one key.
    """
    key_N, names = party.rows.data.key_N, party.recipe.rows.key_names
    if key_N is None or len(names) < 2:
        return {}
    places = [np.flatnonzero(key_N[rows] == number) for number in range(len(names))]
    return {
        name_key(split, name): (rows[places_K], party.rows.take(outputs, places_K))
        for name, places_K in zip(names, places, strict=True)
        if len(places_K)
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
    """Adds the number of rows to the metrics of each split and group of rows, if there are groups
    by holders or by key.
    """
    if party.rows.data.held is None and len(party.recipe.rows.keys) < 2:
        return metrics
    return {
        name: {**values, ROWS: float(len(predictions[name][0]))} for name, values in metrics.items()
    }


class PassiveEvaluate(Phase):
    """Sends embeddings of the rows of all splits, one after the other, in one round. Then it
    receives metrics, sends the mean embedding that replaces this party, and sends embeddings with
    each column permuted, as far as the recipe enables these.
    """

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party, settings))
        self._receiver = MetricsReceiver(party, name, settings.splits)
        self._writer = importance.ImportanceWriter(party, name, settings)
        self._importance = (
            importance.PassiveImportance(party, name, settings, self._scorer.asking)
            if settings.importance
            else None
        )

    def keep(self, folder: Path) -> None:
        self._writer.folder = folder
        self._receiver.keep(folder)

    def run_round(self, round_: int) -> RoundReport:
        party, settings, batch = self._party, self._settings, 0
        for split in settings.splits:
            first = StepKey(self.name, round_, batch)
            batch += self._scorer.answer(party.rows.get_joint(split), first)
        self._receiver.receive(StepKey(self.name, round_, batch))
        batch += count_metrics_steps(party)
        if settings.subsets:
            step = StepKey(self.name, round_, batch)
            stand_in.give(self._scorer.asking, party, settings.absent, step)
            batch += stand_in.count_steps(settings.absent)
        if self._importance is not None:
            ranking = self._importance.run(StepKey(self.name, round_, batch))
            self._writer(ranking)
        return RoundReport(0)
