"""The active side, the paper's server: one memory of keys and one tail for the latents of all parties."""

from __future__ import annotations

import math

import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.context import Party
from vfl_party.methods.mocosfl.contrast import contrast
from vfl_party.methods.mocosfl.course import Course, averaged, build_bottom, halves_of, momentum_of
from vfl_party.methods.mocosfl.exchanges import bottoms, latents
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.training import Half
from vfl_party.phase import Phase, RoundReport, Tree
from vfl_party.seeds import derive_seed
from vfl_party.selfsup.losses import KeyQueue, ema_update


class ActiveMocoSFL(Phase):
    """One round is a part of an epoch, up to the next average. The tail is one of the party's models."""

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        if not party.recipe.passives:
            text = f"recipe: phases: {name}: {party.name} is alone, and the rows are at passive parties"
            raise InputError(Code.CONFIG_INVALID, f"{text}; add some")
        self._course = Course.of(party, name, settings)
        self._tail = party.models["tail"]
        self._half = Half(self._tail, settings)
        self._momentum = momentum_of(self._tail)
        seed = derive_seed(party.recipe.seed, "queue", name)
        self._queue = KeyQueue(settings.queue, settings.width, seed, party.device)
        self._released = party.recipe.preset == "released"
        channels, height, width = halves_of(party.recipe, settings).latent
        sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.answering(name, latents(settings), rows=settings.batch_size, **sizes)
        if not settings.frozen:  # the server compares what all parties plan
            bottom = build_bottom(party.recipe, settings)
            party.asking(name, bottoms(averaged(bottom, None if self._released else bottom)))

    def run_round(self, round_: int) -> RoundReport:
        party, steps = self._party, self._course.steps(round_)
        if round_ == 0:  # start from the tail as another run has trained it
            self._momentum.load_state_dict(self._tail.state_dict())
        self._tail.train()
        total = torch.zeros((), device=party.device)
        for batch, (step, _) in enumerate(steps):
            total += self._step(step)
            party.tick(self.name, round_, self.rounds, batch + 1, len(steps))
        if self._course.ends_epoch(round_):
            self._half.end_epoch()
        loss = total.item() / len(steps)
        if not math.isfinite(loss):
            text = f"phase {self.name}: the loss of {party.name} is {loss}: its training diverged"
            raise InputError(Code.NON_FINITE, f"{text}; take a lower learning rate")
        return RoundReport(len(steps), {"train": {"loss": loss}})

    def _step(self, step: StepKey) -> torch.Tensor:
        settings = self._settings
        ema_update(self._momentum, self._tail, settings.momentum)
        received = self._latents.collect(step)
        q, k = (torch.cat([tensors[name] for tensors in received.values()]) for name in ("q", "k"))
        q.requires_grad_(not settings.frozen)
        self._half.zero_grad()
        tails = self._tail, self._momentum
        loss, keys = contrast(*tails, q, k, self._queue.keys, settings.temperature, halved=not self._released)
        loss.backward()  # type: ignore[no-untyped-call]
        # The parties proceed while the tail is updated: every gradient is of the weights before the update.
        if q.grad is None:
            self._latents.acknowledge(step, received)
        else:
            parts = q.grad.split(settings.batch_size)  # type: ignore[no-untyped-call]
            self._latents.reply(step, {name: {"dq": dq} for name, dq in zip(received, parts, strict=True)})
        self._half.step()
        self._queue.push(keys)
        return loss.detach()

    def state(self) -> Tree:
        return {
            "half": self._half.state(),
            "momentum": dict(self._momentum.state_dict()),
            "queue": self._queue.state(),
        }

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
        self._queue.load_state(tree["queue"])
