"""The active party's side: receives embeddings, computes one joint loss, and returns gradients. If
the recipe enables this, it continues without passive parties that are late or absent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vfl_common.bundle import Lenience, StepKey
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import Rate
from vfl_common.summary import Absence
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.exchanges import LABELS, add_label_gradients, embedding, validation
from vfl_party.methods.splitnn.local import ActiveLocalUpdates, ExchangedBatch
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining, StoppingJudge
from vfl_party.models import CombinedEmbeddings
from vfl_party.models.losses import loss_fn
from vfl_party.models.top import learnt_stand_ins
from vfl_party.models.training import backward
from vfl_party.outbound.filter import Tensors
from vfl_party.phases.absence import Absences, Cache, replace_absent
from vfl_party.phases.context import Party
from vfl_party.phases.drift import Drift
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.passes import HeldBatch, Pass, compute_losses, make_passes
from vfl_party.phases.scoring import SplitScorer
from vfl_party.phases.sets import Sets, Weighed, sum_losses

# The minimum number of seconds between two messages about a party, and the number of messages
# before this limit applies.
_MIN_INTERVAL_S, _NUM_UNLIMITED = 1.0, 5
log = logging.getLogger(__name__)


class AbsentParties:
    """Replaces the embeddings of absent parties, and records their absences.

    All parties must take part in the first step of a generation, because until then they may be
    working on another phase.
    """

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        self._party, self._policy, self._rule = (
            party,
            settings.late_policy,
            party.recipe.model.combine,
        )
        self._names = [passive.name for passive in party.recipe.passives]
        self._widths, self._stand_ins = party.exchanges.widths, learnt_stand_ins(party.models)
        # An active party without features needs the embeddings of at least one passive party.
        self._allowed = Lenience(
            settings.deadline_s or 0.0, at_least=0 if party.rows.features is not None else 1
        )
        self.lenience: Lenience | None = None
        self._cache: Cache | None = None
        if self._policy == "cached" and self._names:
            n = 1 + max(
                (int(rows.max()) for rows in party.rows.data.splits.values() if len(rows)),
                default=0,
            )
            self._cache = Cache(party.exchanges.widths, n, party.device)
        self._absences = Absences(phase)
        self._shows = Rate(_MIN_INTERVAL_S, _NUM_UNLIMITED)
        # {party: the number of steps that it has missed in the current round}.
        self._missed: Counter[str] = Counter()
        # The parties that were absent in the previous round.
        self._reported: frozenset[str] = frozenset()

    def fill(
        self, step: StepKey, rows: Rows, own: Sequence[Tensor], z_BD: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns {passive party: its embeddings [B, D] of a batch, or the replacement of these}.

        This is called after each step. All parties have taken part in the first step, so from then
        on they may be absent.
        """
        if self.lenience is None:
            self.lenience = self._allowed
            self._party.hooks.lenient(True)
        embeddings: dict[str, Tensor | None] = {name: z_BD.get(name) for name in self._names}
        missing = [name for name, z in embeddings.items() if z is None]
        self._missed.update(missing)
        newly_absent, returned = self._absences.note(step, missing)
        for name in newly_absent:
            log.warning(
                "going on without %s at %s",
                name,
                _describe_step(step),
                extra={"event": "away", "away": name},
            )
            self._show("away", name, step)
        for name in returned:
            log.info(
                "%s is back at %s",
                name,
                _describe_step(step),
                extra={"event": "back", "back": name},
            )
            self._show("back", name, step)
        if self._cache is not None:
            embeddings = self._cache.fill(embeddings, rows)
        return replace_absent(
            self._policy, self._rule, own, embeddings, self._widths, self._stand_ins
        )

    def _show(self, event: str, name: str, step: StepKey) -> None:
        """Shows that a party has left or returned, with a limited rate for each party."""
        if self._shows.passes(name, time.monotonic()) is not None:
            self._party.hooks.show(event, party=name, at=_describe_step(step))

    def describe_round(self, round_: int, steps: int) -> str:
        """Returns a sentence about the parties that were absent in the round that has ended; '' if
        there were none, or the same parties as in the previous round.
        """
        missed, self._missed = self._missed, Counter()
        reported_before, self._reported = self._reported, frozenset(missed)
        texts = [
            f"{name} for {missed[name]} of {steps} steps" for name in self._names if missed[name]
        ]
        if not texts or reported_before == self._reported:
            return ""
        return f"round {round_ + 1} went on without {', '.join(texts)}"

    @property
    def absences(self) -> tuple[Absence, ...]:
        """All absences of the phase so far."""
        return self._absences.stretches

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        cache = self._cache.state() if self._cache is not None else None
        return {"absences": self._absences.state(), "cache": cache}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._absences.load_state(tree["absences"])
        if self._cache is not None:
            self._cache.load_state(tree["cache"])


def _describe_step(step: StepKey) -> str:
    """Returns a text about a step, with numbers that start at 1."""
    return f"phase {step.phase}, round {step.round + 1}, batch {step.batch + 1}"


class ActiveSplitNN(Phase):
    """Runs split training. One round is ``validate_every`` epochs, or ``checkpoint_steps`` steps of
    these.

    A step is one batch: the parties send embeddings, the active party computes one loss, and each
    party updates its models (Gupta and Raskar 2018; Algorithm 1 of FedBCD, arXiv 1912.11187, with Q
    = 1). Each optional feature of a recipe is an attribute, which is None by default.
    """

    def __init__(self, party: Party, name: str, settings: SplitNNSettings) -> None:
        self._party, self._settings = party, settings
        self._training = OwnTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        self.epochs = self._training.batches.epochs
        self._embedding = party.exchanges.open_answering(
            name, embedding(settings), width=party.exchanges.widths or party.exchanges.width
        )
        is_partial = party.rows.data.held is not None
        policy = None if settings.learns or is_partial else settings.late_policy
        self._scorer = SplitScorer(party, name, validation(settings), policy=policy)
        self._sets = Sets(party, name, settings)
        self._loss = loss_fn(party.recipe.task)
        self._weights = party.rows.compute_weights(party.rows.get("train"))
        kind = party.recipe.task.kind
        if kind == "ranking" and settings.dcor:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: dcor uses the label of each row, but a ranking task has "
                "pairs of rows. Remove dcor.",
            )
        if party.recipe.task.compares and (
            settings.micro_batches > 1 or settings.cache is not None
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: micro_batches and cache use the loss of each row, but "
                f"the loss of a {kind} task compares the rows of a batch. Remove them.",
            )
        # Some transforms of gradients, such as Marvell, need the labels of the rows.
        self._passes_labels = LABELS in self._embedding.chains.down.knows
        # With a late policy, training continues without a late party.
        self._absent = (
            AbsentParties(party, name, settings) if settings.late_policy != "wait" else None
        )
        self.lenient = self._absent is not None
        # More updates of a batch without an exchange: FedBCD and CELU-VFL.
        self._local = (
            ActiveLocalUpdates(party, settings, self._training, self._sets)
            if settings.local
            else None
        )
        stopping = settings.early_stopping
        self._judge = (
            StoppingJudge(party, name, stopping, self._training) if stopping is not None else None
        )
        # With ``mid``, embeddings of the same row always differ, so their distance has no meaning.
        self._drift = Drift(party.name, compares=not settings.mid)
        # Without validation rows, the drift of embeddings is measured in training steps.
        validates = len(party.rows.get("validation")) > 0
        self._training_drift = None if validates or settings.mid else self._drift

    def run_round(self, round_: int) -> RoundReport:
        party, training = self._party, self._training
        training.train_mode()
        batches, num_exchanges = training.batches.plan(round_), 0
        loss = torch.zeros((), device=party.device)
        for number, batch in enumerate(batches, 1):
            training.zero_grad()
            training.expect(batches, number)
            exchanged_parts = []
            # The losses of a batch's parts add up to the mean over the batch. Usually there is only
            # one part.
            for rows in batch.parts:
                step, place = StepKey(self.name, round_, num_exchanges), (round_, number - 1)
                part_loss, part = self._exchange(step, place, rows, len(rows) / len(batch.rows))
                exchanged_parts.append(part)
                loss += part_loss
                num_exchanges += 1
            training.step()
            if self._local is not None:
                self._local.update(batch.rows, exchanged_parts)
            if batch.last:
                training.end_epoch()
            party.hooks.tick(self.name, round_, self.rounds, number, len(batches))
        metrics = {"train": {"loss": loss.item() / max(1, len(batches))}}
        return self._report(StepKey(self.name, round_, num_exchanges), len(batches), metrics)

    def _exchange(
        self, step: StepKey, place: tuple[int, int], rows: Rows, share: float
    ) -> tuple[Tensor, ExchangedBatch]:
        """Runs one exchange: receives embeddings, adds the gradient of the loss to the parameters'
        gradients, and answers with the gradient of each party's embeddings.

        ``place``: the round and the number of the batch. Returns the loss, multiplied by ``share``,
        and the exchanged tensors.
        """
        party = self._party
        _, targets = party.rows.need_labels()
        y_B = party.rows.take(targets, rows)
        own_embeddings = []
        if party.rows.features is not None:
            own_embeddings = [party.encode(*self._training.inputs(rows, step.round, step.batch))]
        lenience = self._absent.lenience if self._absent is not None else None
        sizes, held_rows = party.rows.get_sizes(rows), party.rows.data.held
        received = self._embedding.collect(step, lenience=lenience, each=sizes, rows=len(rows))
        z_BD = {name: tensors["z"] for name, tensors in received.items()}
        filled_BD = z_BD
        if self._absent is not None:
            filled_BD = self._absent.fill(step, rows, own_embeddings, z_BD)
        combine_rule = party.recipe.model.combine
        sets: Sequence[Weighed] | None
        parts: list[Pass] | None = None
        if held_rows is None:
            sets = drawn = self._sets.draw(filled_BD, *place)
            embeddings = self._sets.embeddings(drawn, own_embeddings, filled_BD)
        else:
            # The forward passes use rows of these tensors, so these must get gradients.
            for z in z_BD.values():
                z.requires_grad_()
            places_by_party = {name: held_rows.of(name, rows) for name in z_BD}
            batch = HeldBatch(
                len(rows), own_embeddings, z_BD, places_by_party, place, party.exchanges.widths
            )
            sets = parts = make_passes(combine_rule, self._sets, batch)
            embeddings = [part.embeddings for part in parts]
        combined = CombinedEmbeddings(
            combine_rule, [*own_embeddings, *filled_BD.values()], z_BD, embeddings
        )
        outputs = [party.outputs(combined_embeddings) for combined_embeddings in combined.values]
        weights = self._take_weights(rows)

        loss = sum_losses(compute_losses(self._loss, outputs, y_B, weights, parts), sets)
        loss = loss if share == 1.0 else loss * share
        labels: Mapping[str, Tensors] = {}
        if self._passes_labels:
            labels = {
                name: {
                    LABELS: y_B
                    if held_rows is None
                    else party.rows.take(y_B, held_rows.of(name, rows))
                }
                for name in z_BD
            }
        backward(loss)
        # The reply comes before the update, so that the parties continue meanwhile. Each gradient
        # belongs to the weights before the update.
        dz_BD = combined.gradients()
        if self._settings.dcor:
            dz_BD = add_label_gradients(dz_BD, z_BD, y_B, self._settings.dcor)
        replies = {name: {"dz": dz} for name, dz in dz_BD.items()}
        described_rows = (
            rows if held_rows is None else {name: rows[held_rows.of(name, rows)] for name in dz_BD}
        )
        self._embedding.reply(step, replies, labels, described_rows)
        if self._training_drift is not None:
            self._training_drift.batch(own_embeddings, z_BD)
        return loss.detach(), ExchangedBatch(rows, z_BD, dz_BD, place)

    def _take_weights(self, rows: Rows) -> Tensor | None:
        return None if self._weights is None else self._party.rows.take(self._weights, rows)

    def _report(
        self, step: StepKey, steps: int, metrics: dict[str, dict[str, float]]
    ) -> RoundReport:
        """Ends a round of ``steps`` steps, with validation if it is due. ``step``: the next
        step.
        """
        report = RoundReport(steps, metrics)
        validates = self._training.batches.validates(step.round)
        if validates:
            step = self._validate(step, metrics)
            report = replace(report, drift=self._drift.measure_drift())
        if self._absent is not None:
            note = self._absent.describe_round(step.round, steps)
            return replace(report, note=note, absences=self._absent.absences)
        if self._judge is not None and validates:
            return self._judge.judge(report, step, self.rounds)
        return report

    def _validate(self, first: StepKey, metrics: dict[str, dict[str, float]]) -> StepKey:
        """Adds the metrics of the validation rows, if there are any, to ``metrics``. Returns the
        next step.
        """
        party, rows = self._party, self._party.rows.get("validation")
        lenience = self._absent.lenience if self._absent is not None else None
        embedded = self._drift.chunks(self._scorer.embeddings(rows, first, lenience))
        scored = self._scorer.scored(embedded)
        if len(rows):
            metrics.update(compute_metrics(party, {"validation": (rows, scored.outputs)}))
        return StepKey(first.phase, first.round, first.batch + scored.steps)

    def state(self) -> Tree:
        absent = self._absent.state() if self._absent is not None else None
        local = self._local.state() if self._local is not None else {}
        best = self._judge.best if self._judge is not None else None
        drift = {"drift": self._drift.state()}
        return self._training.state() | {"best_epoch": best, "absent": absent} | drift | local

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
        if self._judge is not None:
            self._judge.best = tree["best_epoch"]
        # Checkpoints of earlier releases have no ``drift``.
        if "drift" in tree:
            self._drift.load_state(tree["drift"])
        if self._local is not None:
            self._local.load_state(tree)
        if self._absent is not None:
            self._absent.load_state(tree["absent"])

    def finish(self) -> None:
        self._training.restore_best()
