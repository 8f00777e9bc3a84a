"""Sends the metrics that the recipe names to the passive parties, at the end of an evaluation.
Contains both sides.

Metrics are sent as the bytes of float64 numbers, which codecs and transforms leave unchanged. An
undefined metric is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.files import private_file
from vfl_common.text import to_json
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, u8
from vfl_party.phases.context import Party

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
            self._side = party.answering(phase, exchange, **_get_sizes(party, splits))

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
            self._side = party.asking(phase, exchange, **_get_sizes(party, splits))

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
