"""The active party's side, which is the paper's server. It has one memory of keys and one tail for
the latents of all parties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.methods.mocosfl.exchanges import declare_bottoms, declare_handout, declare_latents
from vfl_party.methods.mocosfl.memory import TrainedTail, make_zero
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_bottom,
    build_halves,
    get_averaged_parameters,
)
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_sums


class ActiveMocoSFL(Phase):
    """Trains the tail. One round is the part of an epoch up to the next average. Later phases get
    the tail as one of the party's models.
    """

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._plan = StepPlan.of(party, name, settings)
        self._tail = TrainedTail(party, name, settings)
        channels, height, width = build_halves(party.recipe, settings).latent
        sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.answering(
            name, declare_latents(settings), rows=settings.batch_size, **sizes
        )
        self._handout = (
            party.answering(name, declare_handout(party.models["bottom"]))
            if self._plan.hands_out
            else None
        )
        # The active party also declares this exchange, because the server compares the plans of all
        # parties.
        if not settings.frozen:
            bottom = build_bottom(party.recipe, settings)
            shared = get_averaged_parameters(
                bottom, None if party.recipe.preset == "released" else bottom
            )
            party.asking(name, declare_bottoms(shared, self._plan.draw))

    def run_round(self, round_: int) -> RoundReport:
        party, steps = self._party, len(self._plan.numbers(round_))
        if round_ == 0:
            self._tail.start_from_tail()
            if self._handout is not None:
                step = StepKey(self.name, 0, 0)
                self._handout.reply_all(
                    step, self._handout.collect(step), dict(party.models["bottom"].state_dict())
                )
        total = make_zero(party)
        drawn = self._plan.participants(round_) if self._plan.draw is not None else None
        for num_done, (step, _) in enumerate(self._plan.steps(round_), 1):
            total += self._run_step(step, drawn)
            party.tick(self.name, round_, self.rounds, num_done, steps)
        if self._plan.ends_epoch(round_):
            self._tail.end_epoch()
        note = self._plan.note if round_ == 0 else ""
        return RoundReport(
            steps, {"train": {"loss": self._tail.compute_mean(total, steps)}}, note=note
        )

    def _run_step(self, step: StepKey, drawn: Sequence[str] | None = None) -> Tensor:
        """Runs one step. ``drawn``: the parties that take part; None for all."""
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
        # The reply comes before the update, so that the parties continue meanwhile. Each gradient
        # belongs to the weights before the update.
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
