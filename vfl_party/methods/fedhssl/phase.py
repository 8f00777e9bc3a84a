"""Runs the three steps of a FedHSSL round at a party of either role (Alg. 1): self-supervision
across parties on the aligned rows, local self-supervision, and the aggregation of the tops of the
local encoders. No gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows, full_batches
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.models import TwoTowers, top_state
from vfl_party.models.training import own_optimizer
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, Traffic, f32, noise
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import need_data
from vfl_party.selfsup.losses import KeyQueue, variance_kept
from vfl_party.selfsup.settings import SelfSupPlan, make_plan
from vfl_party.selfsup.towers import (
    Epochs,
    Guide,
    LocalSelfSup,
    Tower,
    TrainedTower,
    build_tower,
    check_finite,
    loss_against,
    make_queue,
    report,
    require_rows,
)

# The names of the two encoders, from which the seeds of their initial weights are also derived.
CROSS, LOCAL = "cross", "local"


def make_kept_encoder(settings: FedHSSLSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that later phases get, with its initial weights. See ``Method.encoder``."""
    match settings.keep_rule:
        case "cross":
            return make(CROSS)
        case "local":
            return make(LOCAL, shared=settings.aggregate)
        case rule:
            width = None
            if rule == "concat":
                width = _halve_width(settings, make)
            return TwoTowers(
                make(CROSS, width=width), make(LOCAL, shared=settings.aggregate, width=width), rule
            )


def select_encoder(encoder: nn.Module, tower: str) -> nn.Module:
    """Returns one of the two encoders that ``make_kept_encoder`` has made. See ``Method.part``."""
    if not isinstance(encoder, TwoTowers):
        raise ValueError(
            "the phases of that run do not hand on two encoders. Remove it, or set start.phases "
            "as in that run."
        )
    if encoder.rule == "concat":
        raise ValueError(
            "with keep = 'concat' an encoder gives half of the embedding. Remove it, or pretrain "
            "with keep = 'mean'."
        )
    return encoder.cross if tower == CROSS else encoder.local


def collect_encoders(party: Party, settings: FedHSSLSettings) -> dict[str, nn.Module]:
    """Returns {"cross": encoder, "local": encoder}, on the party's device: each encoder that is
    kept or trained.
    """
    make, encoder = party.make_encoder, party.models["encoder"]
    assert make is not None  # noqa: S101 - a party with features has it
    if isinstance(encoder, TwoTowers):
        return {CROSS: encoder.cross, LOCAL: encoder.local}
    if settings.keep_rule not in (CROSS, LOCAL):
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: an earlier phase hands on one encoder, but keep = "
            f"{settings.keep_rule!r} needs two. Give both phases the same keep.",
        )
    encoders: dict[str, nn.Module] = {settings.keep_rule: encoder}
    # In FedGSSL* and FedHSSL*, later phases do not get the cross-party encoder, so it is made here.
    if settings.cross and CROSS not in encoders:
        encoders[CROSS] = make(CROSS).to(party.device)
    if settings.local and LOCAL not in encoders:
        encoders[LOCAL] = make(LOCAL, shared=settings.aggregate).to(party.device)
    return encoders


def _halve_width(settings: FedHSSLSettings, make: MakeEncoder) -> int:
    width = make.width
    if width % 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: keep = {settings.keep!r} gives each encoder half of the embedding, "
            f"so model.embedding_size must be even (got {width}). Set an even number.",
        )
    return width // 2


def declare_projection(settings: FedHSSLSettings) -> Exchange:
    """Declares the exchange of projections. Each passive party sends its projections up. The active
    party sends its projections down, the same to all. No gradients are sent.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")})
    down = Sent(
        Kind.EMBEDDING,
        {"z": f32("rows", "width")},
        noise("iso", amplifier=settings.iso_embedding),
        label_free=True,
    )
    return Exchange("projection", up, down)


def declare_weights(settings: FedHSSLSettings, shared: Mapping[str, Tensor]) -> Exchange:
    """Declares the exchange of weights. Each party sends the weights of its top encoder, projector
    and predictor up. The server sends their mean down.

    ``shared``: {name: tensor} of these weights. The active party adds noise to parameters, but
    sends BatchNorm's statistics unchanged.
    """
    tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.items()}
    statistics = [
        name for name, tensor in shared.items() if not isinstance(tensor, torch.nn.Parameter)
    ]
    transforms = noise("iso", role="active", leave=statistics, amplifier=settings.iso_weights)
    up, down = Sent(Kind.WEIGHTS, tensors, transforms, label_free=True), Sent(Kind.WEIGHTS, tensors)
    return Exchange("weights", up, down, asks="server", when="every round")


Inputs = tuple[Tensor, ...]


class CrossStep:
    """Base class of both sides. Trains the tower f_c, with its predictor h_c, on received
    projections.

    Args:
        peers: The parties whose projections this party receives.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: FedHSSLSettings,
        plan: SelfSupPlan,
        encoder: nn.Module,
        peers: list[str],
    ) -> None:
        self._party, self._phase, self._settings, self._plan = party, phase, settings, plan
        self._rows = require_rows(party, phase, "aligned", plan.batch_size)
        self.tower = build_tower(party, phase, CROSS, encoder, plan, shared=False)
        self._trained = TrainedTower(self.tower, plan, settings.rounds * settings.cross_epochs)
        self._keys: dict[str, KeyQueue] = {}
        # The queues hold received projections, so they add no traffic.
        if plan.ssl == "moco" and plan.negatives == "queue":
            sizes = {"rows": len(self._rows), "width": self.tower.width}
            self._keys = {
                peer: make_queue(party, phase, f"{CROSS} {peer}", plan, **sizes) for peer in peers
            }
        self._open(declare_projection(settings), rows=plan.batch_size, width=self.tower.width)

    @property
    def steps(self) -> int:
        """The number of steps in a round."""
        return self._settings.cross_epochs * (len(self._rows) // self._plan.batch_size)

    def run(self, round_: int, tick: Callable[[], None]) -> Epochs:
        """Runs the cross-party epochs of one round and calls ``tick`` after each step."""
        party, epochs = self._party, self._settings.cross_epochs
        features = party.rows.need_features()
        self.tower.train()
        total, variance = torch.zeros((), device=party.device), torch.zeros((), device=party.device)
        batch = 0
        for epoch in range(epochs):
            for rows in features.expecting(self._batches(round_ * epochs + epoch)):
                step = StepKey(self._phase, round_, batch)
                loss, z_BP = self._run_step(step, features.inputs(rows), rows)
                total += loss
                variance += variance_kept(z_BP)
                batch += 1
                tick()
            self._trained.end_epoch()
        result = Epochs(batch, total.item() / batch, variance.item() / batch)
        return check_finite(result, party, self._phase, CROSS)

    def _batches(self, epoch: int) -> list[Rows]:
        return full_batches(
            self._party.recipe.seed, self._phase, epoch, self._rows, self._plan.batch_size
        )

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        """Opens this side of the exchange of projections."""
        raise NotImplementedError

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _update_locally(
        self, inputs: Inputs, z_BP: Tensor, received: Mapping[str, Tensor]
    ) -> Tensor:
        """Runs lines 12 and 13 of Alg. 1 ``local_updates`` times on the same received projections.
        Returns the loss of the first update.

        Args:
            inputs: The encoder's inputs for the batch.
            z_BP: This party's projections [B, P], with the graph of the weights before the update.
            received: {peer: the peer's projections [B, P]}.
        """
        first_loss: Tensor | None = None
        for _ in range(self._settings.local_updates):
            if first_loss is not None:
                (z_BP,) = self.tower.project(self._party, inputs)
            p_BP = self.tower.predict(z_BP)
            terms = [
                loss_against(self._plan, p_BP, z, self._keys.get(peer))
                for peer, z in received.items()
            ]
            # Eq. 5: the mean over peers. A passive party has only one peer.
            loss = torch.stack(terms).mean()
            self._trained.step(loss)
            first_loss = loss.detach() if first_loss is None else first_loss
        for peer, queue in self._keys.items():
            queue.push(received[peer])
        assert first_loss is not None  # noqa: S101 - local_updates is positive
        return first_loss

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "trained": self._trained.state(),
            "keys": {peer: queue.state() for peer, queue in self._keys.items()},
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._trained.load_state(tree["trained"])
        for peer, queue in self._keys.items():
            queue.load_state(tree["keys"][peer])


class ActiveCross(CrossStep):
    """The active party's side, which receives the projections of all passive parties and sends its
    own.
    """

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        self._projection = self._party.exchanges.open_answering(self._phase, exchange, **sizes)

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        # Alg. 1, line 6: own projections.
        (z_BP,) = self.tower.project(self._party, inputs)
        received = self._projection.collect(step)
        # Alg. 1, line 8: own projections to all passive parties.
        self._projection.reply_all(step, received, {"z": z_BP}, rows)
        loss = self._update_locally(
            inputs, z_BP, {peer: tensors["z"] for peer, tensors in received.items()}
        )
        return loss, z_BP.detach()


class PassiveCross(CrossStep):
    """A passive party's side, which receives only the projections of the active party."""

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        self._projection = self._party.exchanges.open_asking(self._phase, exchange, **sizes)

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        # Alg. 1, line 6: own projections.
        (z_BP,) = self.tower.project(self._party, inputs)
        # Alg. 1, line 10: own projections to the active party.
        self._projection.send(step, {"z": z_BP}, rows)
        reply = self._projection.receive(step)
        loss = self._update_locally(inputs, z_BP, {self._projection.peer: reply["z"]})
        return loss, z_BP.detach()


class FedHSSL(Phase):
    """Runs FedHSSL. One round is one global iteration. Later phases get the encoders. Heads and
    target encoders are discarded after the phase.
    """

    side: type[CrossStep]

    def __init__(self, party: Party, name: str, settings: FedHSSLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._warned: set[str] = set()
        if party.rows.features is None:
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
            self._party.exchanges.connections.unhurried()
        return report(self._party.name, epochs_by_step, self._warned)

    def _ticker(self, round_: int, local_epochs: int) -> Callable[[], None]:
        """Returns a function that counts the steps of the round for the progress display."""
        steps = self._cross.steps if self._cross is not None else 0
        steps += self._local.steps(local_epochs) if self._local is not None else 0
        return self._party.hooks.make_ticker(self.name, round_, self.rounds, steps)

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
        self._weights = party.exchanges.open_asking(
            phase, declare_weights(settings, get_shared_state(tower))
        )

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


def traffic(party: Party, name: str, settings: FedHSSLSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    weights = None
    if settings.aggregate:
        need_data(party, name, "the weights that the server averages")
        if (name, "weights") not in party.exchanges.opened:
            # Making the phase opens the exchange, whose shapes are taken from the models.
            PassiveFedHSSL(party, name, settings)
        weights = party.exchanges.opened[name, "weights"].exchange
    return Traffic(_yield_occurrences(party, name, settings, weights))


def _yield_occurrences(
    party: Party, name: str, settings: FedHSSLSettings, weights: Exchange | None
) -> Iterator[Occurrence]:
    plan, projection, steps = (
        make_plan(settings, party.recipe.preset),
        declare_projection(settings),
        0,
    )
    # With keep = "concat", each of the two encoders computes half of the embedding.
    width = plan.width(party.exchanges.width // (2 if settings.keep_rule == "concat" else 1))
    if settings.cross:
        steps = settings.cross_epochs * (
            len(require_rows(party, name, "aligned", plan.batch_size)) // plan.batch_size
        )
    for round_ in range(settings.rounds):
        for batch in range(steps):
            yield Occurrence.of(
                projection, StepKey(name, round_, batch), rows=plan.batch_size, width=width
            )
        if weights is not None:
            yield Occurrence.of(weights, StepKey(name, round_, 0))
