"""A method: the split training of plain_split, which looks at the validation rows after each round,
ends early, and keeps its best weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from plain_split import Active, Passive, Plain, PlainSettings, Side, steps
from pydantic import PositiveInt

from vfl.api import (
    NOTHING,
    Code,
    Exchange,
    InputError,
    Kind,
    Occurrence,
    Party,
    RoundReport,
    Sent,
    SplitScorer,
    StepKey,
    Traffic,
    evaluate,
    scoring,
    scoring_traffic,
    u8,
)

# The embeddings of the validation rows go up, in the chunks of every joint forward pass.
VALIDATION = scoring(name="validation")
# Two bits: whether this round is the best so far, and whether it is the last.
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(2)}), when="every round")


class WatchedSettings(PlainSettings):
    """``patience``: after how many rounds without a smaller validation loss the phase ends."""

    patience: PositiveInt = 3


class Watching(Side):
    """The part that both sides add: the weights of the best round."""

    best: dict[str, Any]

    def remember(self) -> None:
        self.best = {name: value.clone() for name, value in self.models.state_dict().items()}

    def finish(self) -> None:
        """Ends the phase, once, with the weights of the best round."""
        self.models.load_state_dict(self.best)

    def state(self) -> dict[str, Any]:
        return super().state() | {"best": self.best}

    def load_state(self, tree: dict[str, Any]) -> None:
        super().load_state(tree)
        self.best = tree["best"]


class WatchedPassive(Watching, Passive):
    def __init__(self, party: Party, name: str, settings: WatchedSettings) -> None:
        super().__init__(party, name, settings)
        self.scorer = SplitScorer(party, name, VALIDATION)
        self.verdict = party.exchanges.open_asking(name, VERDICT)

    def run_round(self, round_: int) -> RoundReport:
        report = super().run_round(round_)
        rows, first = self.party.rows.get("validation"), StepKey(self.name, round_, report.steps)
        answered = self.scorer.answer(rows, first)
        step = StepKey(self.name, round_, report.steps + answered)
        best, last = self.verdict.swap(step, {})["verdict"].tolist()
        if best:
            self.remember()
        return replace(report, done=bool(last))


class WatchedActive(Watching, Active):
    def __init__(self, party: Party, name: str, settings: WatchedSettings) -> None:
        super().__init__(party, name, settings)
        if not len(party.rows.get("validation")):
            text = f"phases: {name}: there are no validation rows; set rows.validation"
            raise InputError(Code.CONFIG_INVALID, text)
        self.patience = settings.patience
        self.scorer = SplitScorer(party, name, VALIDATION)
        self.verdict = party.exchanges.open_answering(name, VERDICT)
        # Rounds since the best one, and its metrics.
        self.since, self.found = 0, dict[str, dict[str, float]]()

    def run_round(self, round_: int) -> RoundReport:
        report = super().run_round(round_)
        party, first = self.party, StepKey(self.name, round_, report.steps)
        scored = self.scorer.score(party.rows.get("validation"), first)
        labels, targets = party.rows.need_labels()
        y_N = party.rows.take(targets, party.rows.get("validation"))
        found = evaluate(party.recipe.task, scored.outputs, y_N, labels.unscale)
        metrics = {**report.metrics, "validation": found}
        best = not self.found or found["loss"] < self.found["validation"]["loss"]
        if best:
            self.found = metrics
            self.remember()
        self.since = 0 if best else self.since + 1
        last = self.since >= self.patience
        step = StepKey(self.name, round_, report.steps + scored.steps)
        verdict = torch.tensor([best, last], dtype=torch.uint8)
        self.verdict.reply_all(step, self.verdict.collect(step), {"verdict": verdict})
        ends = last or round_ + 1 == self.rounds
        kept = self.found if ends and not best else None
        return replace(report, metrics=metrics, done=last, kept=kept)

    def state(self) -> dict[str, Any]:
        return super().state() | {"since": self.since, "found": self.found}

    def load_state(self, tree: dict[str, Any]) -> None:
        super().load_state(tree)
        self.since, self.found = tree["since"], tree["found"]


class Watched(Plain):
    """Adds validation and verdict to what a forecast counts."""

    def traffic(self, party: Party, phase: str, settings: PlainSettings) -> Traffic:
        trained, rows = super().traffic(party, phase, settings), party.rows.get("validation")

        def occurrences() -> Iterator[Occurrence]:
            training = list(trained.occurrences)
            for round_ in range(settings.epochs):
                yield from (each for each in training if each.step.round == round_)
                first = len(steps(party, phase, round_, settings))
                scored = scoring_traffic(party, phase, VALIDATION, round_, first, rows)
                yield from scored
                yield Occurrence.of(VERDICT, StepKey(phase, round_, first + len(scored)))

        return Traffic(occurrences(), may_end_early=True)


METHOD = Watched(WatchedSettings, WatchedActive, WatchedPassive, encodes=True)
