"""Code that both sides of split training share: the optimizer of a party's models, early stopping,
and the list of the exchanges.

The active party evaluates each validation and sends a verdict. All parties keep the weights of the
best validation, and use them at the end of the phase. Plateau schedules use the same verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.bundle import Kind, StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.batches import Batch, Batches
from vfl_party.methods.splitnn.exchanges import embedding, validation
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.models.top import learnt_stand_ins
from vfl_party.models.training import (
    EarlyStopping,
    Plateau,
    build_optimizer,
    build_schedule,
    clip,
    own_optimizer,
)
from vfl_party.outbound import transforms
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, Traffic, u8
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring_traffic, split_into_chunks
from vfl_party.phases.stopping import check_stopping, get_monitored_value, is_better
from vfl_party.selfsup.augment import BatchViews


class OwnTraining:
    """A party's optimizer and schedule for all its models, and a copy of the models' best
    weights.
    """

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        timeout_s = party.recipe.run.step_timeout_s
        if settings.deadline_s is not None and settings.deadline_s >= timeout_s:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: deadline_s must be less than run.step_timeout_s = "
                f"{timeout_s:g}, after which a late party ends the run (got "
                f"{settings.deadline_s:g}). Lower deadline_s, or raise run.step_timeout_s.",
            )
        self.batches, batch_size = Batches(party, phase, settings), settings.batch_size
        # The other parties' models are not used together with ``solo``.
        joint_models = {name: model for name, model in party.models.items() if name != "solo"}
        self._models, self._validation = nn.ModuleDict(joint_models), party.rows.get("validation")
        norms = any(isinstance(module, _BatchNorm) for module in self._models.modules())
        if norms and min(batch_size, len(party.rows.get("train"))) < 2:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {party.name}: batch normalization needs batches of at least 2 rows. Add "
                "rows, increase batch_size, or choose another encoder.",
            )
        if norms and party.recipe.rows.partial:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {party.name}: batch normalization needs batches of at least 2 rows, but "
                "with rows.partial a batch may have only one. Choose an encoder and a top model "
                "without batch normalization.",
            )
        if norms and (kind := _find_row_transform(party, phase)):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: transforms: {kind}: {party.name} uses batch "
                "normalization, which makes a row's embedding depend on its whole batch, so the "
                "epsilon does not hold. Choose an encoder without it.",
            )
        corrupts = settings.augment is not None and settings.augment.corruption
        if corrupts and (kind := _find_row_transform(party, phase)):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: transforms: {kind}: augment.corruption copies numbers "
                "of other rows into a row, so the epsilon does not hold. Remove one of them.",
            )
        if norms and settings.micro_batches > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: micro_batches: {party.name} uses batch normalization, "
                "whose statistics need the whole batch. Set micro_batches = 1, or choose an "
                "encoder without it.",
            )
        has_processes = party.rows.features is not None and not party.encode.on_one_device
        if settings.under_way > 1 and party.role == "passive" and has_processes:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: in_flight and micro_batches: {party.name} has several "
                "processes, which work on one batch at a time. Start one process, or set both to "
                "1.",
            )
        self._party, augment = party, settings.augment
        self._views = BatchViews(party, phase, augment) if augment is not None else None
        self._params = list(self._models.parameters())
        self._stand_ins = learnt_stand_ins(party.models)
        party_optimizer = own_optimizer(party.recipe, phase, party.name, settings.optimizers)
        self._settings = settings.optimizer if party_optimizer is None else party_optimizer
        self._optimizer = build_optimizer(self._settings, self._params)
        self._schedule = build_schedule(self._settings, self._optimizer, self.batches.epochs)
        self._best: dict[str, Tensor] | None = None

    def inputs(self, rows: Rows, *place: int) -> tuple[Tensor, ...]:
        """Returns the encoder's arguments for a batch, [B, …]. ``place``: the batch's round and
        number.
        """
        if self._views is not None:
            return self._views.inputs(rows, *place)
        return self._party.rows.need_features().inputs(rows)

    def expect(self, batches: Sequence[Batch], number: int) -> None:
        """Prefetches this party's rows of batch ``number``, if the batch exists and has only one
        part.
        """
        features = self._party.rows.features
        if features is not None and number < len(batches) and len(batches[number].parts) == 1:
            features.expect(batches[number].rows)

    def train_mode(self) -> None:
        """Puts the models into training mode."""
        self._models.train()

    def zero_grad(self) -> None:
        """Clears the gradients."""
        # This has the same effect as Optimizer.zero_grad, which takes 80 µs if its code is not in
        # the CPU cache.
        for parameter in self._params:
            parameter.grad = None
        if self._stand_ins is not None:
            self._stand_ins.zero_gradients()

    def step(self) -> None:
        """Clips this party's gradient if the recipe sets ``clip_norm``, and updates the models."""
        clip(self._settings, self._params)
        self._optimizer.step()

    def end_epoch(self) -> None:
        """Steps the schedule of the learning rate."""
        self._schedule.step()

    def catch_up(self, round_: int) -> None:
        """Advances the schedule to the first epoch of a round, if earlier rounds were skipped."""
        while self._schedule.last_epoch < self.batches.epochs_before(round_):
            self._schedule.step()

    def note_validation(self, *, best: bool) -> None:
        """Keeps a copy of the current weights if a validation was the ``best`` one so far."""
        if best:
            self._best = {
                name: value.detach().clone() for name, value in self._models.state_dict().items()
            }
        if isinstance(self._schedule, Plateau):
            self._schedule.note_validation(best=best)

    def restore_best(self) -> None:
        """Loads the weights of the best validation, if there was one."""
        if self._best is not None:
            self._models.load_state_dict(self._best)

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "best": self._best,
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
        self._best = tree["best"]


def _find_row_transform(party: Party, phase: str) -> str:
    """Returns the kind of a transform of this party's embeddings whose privacy guarantee is for one
    row; '' without one.
    """
    where = f"recipe: phases: {phase}: transforms"
    uses = [
        transform
        for settings in party.recipe.phases
        if settings.name == phase
        for transform in settings.transforms
    ]
    kinds = [
        transform.kind
        for transform in uses
        if transform.sent_by == party.role == "passive" and transform.exchange == "embedding"
    ]
    return next((kind for kind in kinds if transforms.load(kind, where).of_row), "")


# The bits of the verdict on a round: it is the best so far, or the phase ends.
_BEST, _STOP = 1, 2
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(1)}), when="every round")


class StoppingJudge:
    """The active party's side, which decides on early stopping. Raises InputError if there is no
    metric to monitor.
    """

    def __init__(
        self, party: Party, phase: str, rule: EarlyStopping, training: OwnTraining
    ) -> None:
        self._party, self._phase, self._rule, self._training = party, phase, rule, training
        # The monitored value, number and metrics of the best round.
        self.best: dict[str, Any] | None = None
        check_stopping(party, phase, rule)
        self._verdicts = party.exchanges.open_answering(phase, VERDICT)

    def judge(self, report: RoundReport, step: StepKey, rounds: int) -> RoundReport:
        """Decides after a round with validation whether the phase ends, and sends the verdict to
        the passive parties at ``step``. Returns the report with the decision and the weights that
        are kept.

        ``rounds``: the number of rounds of the phase.
        """
        round_, training = step.round, self._training
        report = replace(report, judged=self._rule.metric)
        value = get_monitored_value(self._phase, self._rule, report.metrics["validation"])
        best = self.best
        if best is None or is_better(self._party.recipe.task, self._rule, value, best["value"]):
            best = self.best = {"value": value, "round": round_, "metrics": report.metrics}
        is_best = best["round"] == round_
        training.note_validation(best=is_best)
        validations = training.batches.validations
        stops = bool(validations(round_) - validations(best["round"]) >= self._rule.patience)
        verdict = torch.tensor([is_best * _BEST | stops * _STOP], dtype=torch.uint8)
        self._verdicts.reply_all(step, self._verdicts.collect(step), {"verdict": verdict})
        if is_best or not (stops or round_ + 1 == rounds):
            return replace(report, done=stops)
        note = (
            f"{self._phase} {'stops early after' if stops else 'ends with'} round {round_ + 1} "
            f"and keeps the weights of round {best['round'] + 1}"
        )
        return replace(report, done=stops, kept=best["metrics"], note=note)


class VerdictReceiver:
    """A passive party's side, which receives the verdicts."""

    def __init__(self, party: Party, phase: str, training: OwnTraining) -> None:
        self._training, self._verdicts = training, party.exchanges.open_asking(phase, VERDICT)

    def receive_verdict(self, step: StepKey) -> bool:
        """Receives the verdict at ``step``. Returns whether the phase ends with this round."""
        verdict = int(self._verdicts.swap(step, {})["verdict"][0])
        self._training.note_validation(best=bool(verdict & _BEST))
        return bool(verdict & _STOP)


def traffic(party: Party, name: str, settings: SplitNNSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    stops_early = settings.early_stopping is not None
    batches = Batches(party, name, settings)
    # Nothing is sent to or by an absent party.
    may_end_early = stops_early or settings.late_policy != "wait"
    occurrences = _yield_occurrences(party, name, batches, settings)
    # Each part has at least one row, so there are at most as many parts as rows.
    parts = min(settings.micro_batches, settings.batch_size)
    return Traffic(
        occurrences,
        may_end_early=may_end_early,
        in_flight=settings.in_flight * parts,
        parts=parts,
        bound=party.exchanges.bound,
    )


def _yield_occurrences(
    party: Party, name: str, batches: Batches, settings: SplitNNSettings
) -> Iterator[Occurrence]:
    exchange, validation_exchange = embedding(settings), validation(settings)
    for round_ in range(batches.rounds):
        sizes = batches.sizes(round_)
        if party.rows.data.held is None:
            for batch, rows in enumerate(sizes):
                yield from party.exchanges.list_occurrences(
                    exchange, StepKey(name, round_, batch), rows=rows
                )
        else:
            for batch, part in enumerate(batches.exchange_rows(round_)):
                yield from party.exchanges.list_joint_occurrences(
                    exchange, StepKey(name, round_, batch), part
                )
        if not batches.validates(round_):
            continue
        validation_occurrences = scoring_traffic(
            party, name, validation_exchange, round_, len(sizes), party.rows.get_joint("validation")
        )
        yield from validation_occurrences
        steps = len(sizes) + len(split_into_chunks(party.rows.get_joint("validation")))
        if settings.early_stopping is not None:
            yield Occurrence.of(VERDICT, StepKey(name, round_, steps))
