"""The active side, the paper's server: one memory of keys and one tail for the latents of all
parties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.methods.mocosfl.exchanges import bottoms, handout, latents
from vfl_party.methods.mocosfl.memory import TrainedTail, zero
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_bottom,
    get_averaged_parameters,
    halves_of,
)
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_sums


class ActiveMocoSFL(Phase):
    """One round is a part of an epoch, up to the next average. The tail is one of the party's
    models.
    """

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._course = StepPlan.of(party, name, settings)
        self._tail = TrainedTail(party, name, settings)
        channels, height, width = halves_of(party.recipe, settings).latent
        sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.answering(name, latents(settings), rows=settings.batch_size, **sizes)
        self._handout = (
            party.answering(name, handout(party.models["bottom"]))
            if self._course.hands_out
            else None
        )
        # Declared here, too, because the server compares the plans of all parties.
        if not settings.frozen:
            bottom = build_bottom(party.recipe, settings)
            shared = get_averaged_parameters(
                bottom, None if party.recipe.preset == "released" else bottom
            )
            party.asking(name, bottoms(shared, self._course.draw))

    def run_round(self, round_: int) -> RoundReport:
        party, steps = self._party, len(self._course.numbers(round_))
        if round_ == 0:
            self._tail.begin()
            if self._handout is not None:
                step = StepKey(self.name, 0, 0)
                self._handout.reply_all(
                    step, self._handout.collect(step), dict(party.models["bottom"].state_dict())
                )
        total = zero(party)
        drawn = self._course.participants(round_) if self._course.draw is not None else None
        for done, (step, _) in enumerate(self._course.steps(round_), 1):
            total += self._step(step, drawn)
            party.tick(self.name, round_, self.rounds, done, steps)
        if self._course.ends_epoch(round_):
            self._tail.end_epoch()
        note = self._course.note if round_ == 0 else ""
        return RoundReport(steps, {"train": {"loss": self._tail.mean(total, steps)}}, note=note)

    def _step(self, step: StepKey, drawn: Sequence[str] | None = None) -> Tensor:
        """Runs one step. ``drawn``: the parties that take part, None for all."""
        settings = self._settings
        senders: dict[str, dict[str, int]] | None = None
        if drawn is not None:
            senders = {name: {} for name in drawn}
        received = self._latents.collect(step, each=senders)
        q, k = (torch.cat([tensors[name] for tensors in received.values()]) for name in ("q", "k"))
        q.requires_grad_(not settings.frozen)
        loss = self._tail.loss(q, k, [*received])
        loss.backward()  # type: ignore[no-untyped-call]
        check_sums(self._party, step, loss, [] if q.grad is None else [q.grad], received)
        # The parties proceed while the tail is updated: every gradient is of the weights before the
        # update.
        if q.grad is None:
            self._latents.acknowledge(step, received)
        else:
            parts = torch.split(q.grad, settings.batch_size)
            self._latents.reply(
                step, {name: {"dq": dq} for name, dq in zip(received, parts, strict=True)}
            )
        self._tail.step()
        return loss.detach()

    def state(self) -> Tree:
        return self._tail.state()

    def load_state(self, tree: Tree) -> None:
        self._tail.load_state(tree)
