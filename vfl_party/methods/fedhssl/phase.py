"""Runs the three steps of a FedHSSL round at a party of either role (Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.methods.fedhssl.cross import ActiveCross, CrossStep, PassiveCross
from vfl_party.methods.fedhssl.encoders import CROSS, LOCAL, collect_encoders
from vfl_party.methods.fedhssl.exchanges import declare_weights
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.models import top_state
from vfl_party.models.training import own_optimizer
from vfl_party.phases.context import Party
from vfl_party.selfsup.settings import make_plan
from vfl_party.selfsup.towers import Epochs, Guide, LocalSelfSup, Tower, build_tower, report


class FedHSSL(Phase):
    """Runs FedHSSL. One round is one global iteration. Later phases get the encoders. Heads and
    target encoders are discarded after the phase.
    """

    side: type[CrossStep]

    def __init__(self, party: Party, name: str, settings: FedHSSLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._warned: set[str] = set()
        if party.features is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: {party.name} has no features, but the encoder of every "
                f"party takes part. Give {party.name} features.",
            )
        if (settings.cross or settings.aggregate) and not party.recipe.passives:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: cross and aggregate need several parties, but "
                f"{party.name} is alone. Set both to false, or add a passive party.",
            )
        preset = party.recipe.preset
        gamma = settings.guidance(preset)
        party_optimizer = own_optimizer(party.recipe, name, party.name, settings.optimizers)
        plan, encoders = (
            make_plan(settings, preset, gamma, party_optimizer),
            collect_encoders(party, settings),
        )
        self._cross = self._local = self._aggregation = None
        self.alone_from = None if settings.cross or settings.aggregate else 0
        if settings.cross:
            peers = [party.recipe.active.name]
            if party.name == party.recipe.active.name:
                peers = [passive.name for passive in party.recipe.passives]
            self._cross = self.side(party, name, settings, plan, encoders[CROSS], peers)
        if settings.local:
            drifts = preset == "released"
            guide = Guide(self._cross.tower, gamma, drifts) if self._cross is not None else None
            self._local = LocalSelfSup(
                party,
                name,
                plan,
                build_tower(party, name, LOCAL, encoders[LOCAL], plan, shared=settings.aggregate),
                epochs=settings.rounds * settings.local_epochs,
                guide=guide,
                split="aligned" if settings.local_rows == "aligned" else "local",
            )
            if settings.aggregate:
                self._aggregation = AggregationStep(party, name, self._local.tower, settings)

    def run_round(self, round_: int) -> RoundReport:
        epochs_by_step: dict[str, Epochs] = {}
        epochs = self._settings.local_epochs
        tick = self._ticker(round_, epochs)
        # Step 1: self-supervision across parties.
        if self._cross is not None:
            epochs_by_step["cross"] = self._cross.run(round_, tick)
        # Step 2: local self-supervision.
        if self._local is not None:
            epochs_by_step["local"] = self._local.run(round_, epochs, tick)
        # Step 3: aggregation of the encoders' tops.
        if self._aggregation is not None:
            self._aggregation.run(round_)
        elif self._local is not None:
            self._party.unhurried()
        return report(self._party.name, epochs_by_step, self._warned)

    def _ticker(self, round_: int, local_epochs: int) -> Callable[[], None]:
        """Returns a function that counts the steps of the round for the progress display."""
        steps = self._cross.steps if self._cross is not None else 0
        steps += self._local.steps(local_epochs) if self._local is not None else 0
        return self._party.ticker(self.name, round_, self.rounds, steps)

    def state(self) -> Tree:
        trainers = {"cross": self._cross, "local": self._local}
        return {name: trainer.state() for name, trainer in trainers.items() if trainer is not None}

    def load_state(self, tree: Tree) -> None:
        for name, trainer in (("cross", self._cross), ("local", self._local)):
            if trainer is not None:
                trainer.load_state(tree[name])


class ActiveFedHSSL(FedHSSL):
    """FedHSSL at the active party."""

    side = ActiveCross


class PassiveFedHSSL(FedHSSL):
    """FedHSSL at a passive party."""

    side = PassiveCross


def get_shared_state(tower: Tower) -> dict[str, Tensor]:
    """Returns {name: tensor} for f_lt ∘ h_l: the parameters and float buffers of top encoder,
    projector and predictor, without copying them.
    """
    state = {f"encoder.{name}": tensor for name, tensor in top_state(tower.encoder).items()}
    for part in ("projector", "predictor"):
        for name, tensor in getattr(tower, part).state_dict(keep_vars=True).items():
            # This skips BatchNorm's integer num_batches_tracked.
            if tensor.is_floating_point():
                state[f"{part}.{name}"] = tensor
    return state


class AggregationStep:
    """One party's side of the aggregation. The server does not average the optimizer's state."""

    def __init__(self, party: Party, phase: str, tower: Tower, settings: FedHSSLSettings) -> None:
        self._party, self._phase, self._tower = party, phase, tower
        self._weights = party.asking(phase, declare_weights(settings, get_shared_state(tower)))

    @torch.no_grad()
    def run(self, round_: int) -> None:
        """Sends the weights of this party's top, and loads the mean of all parties."""
        shared = get_shared_state(self._tower)
        step = StepKey(self._phase, round_, 0)
        mean = self._weights.swap(step, {name: tensor.detach() for name, tensor in shared.items()})
        for name, tensor in shared.items():
            # A mean of variances from honest parties is never negative.
            if name.endswith(".running_var") and bool((mean[name] < 0).any()):
                raise PeerError(
                    Code.NON_FINITE,
                    f"{step}: the averaged {name} is negative, so a party sent weights that "
                    "training cannot produce.",
                    party=self._party.recipe.server,
                )
            tensor.copy_(mean[name])
