"""FedHSSL in one process, from Algorithm 1 of the paper: the reference of the exactness tests.

Nothing is sent: the parties are a list, the server's mean is a sum over it. It shares no code with
the transport, the phases, the runner, the losses, the queue or ``vfl_party.models.training``. It
shares what both must start from: encoders as built, seeds, tables, preprocessing, and the random
views (``vfl_party.selfsup.augment``), which are inputs here.

Where a formula leaves the rounding open, it takes the product's operations of torch: the cosine,
the softmax, ``lerp``, fused SGD. Otherwise a last bit may tip a ReLU or a pooling, and move a
weight by far more: with other rounding 3e-5 was seen on a processor without AVX-512. That these
operations are the paper's formulas is tested apart (``unit/test_ssl_losses.py``).

Line numbers are those of Algorithm 1. Losses: Eqs. 2 to 6.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.harness import wiring
from tests.harness.present import present
from tests.harness.reference import Updates, clip_gradients, one_thread, own_table
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Preprocessor, load_table
from vfl_party.models import build_encoder, seed_torch
from vfl_party.selfsup.augment import make_augment
from vfl_party.selfsup.settings import AugmentSettings

WEIGHT_DECAY, SGD_MOMENTUM = 3e-5, 0.9
# What the released code's views of tables are.
RELEASED = {"corrupt": "one", "replacement": "uniform", "exact_share": True}


def _heads(settings: dict[str, Any], width: int) -> tuple[nn.Module, nn.Module]:
    """Makes a projector, three linear layers with BatchNorm and ReLU between, and a predictor, P ->
    hidden -> P.
    """
    layers: list[nn.Module] = []
    for number, size in enumerate(settings["projector"]):
        layers += [nn.ReLU()] if number else []
        layers += [nn.Linear(width, size, bias=False), nn.BatchNorm1d(size)]
        width = size
    if settings["ssl"] == "moco":
        return nn.Sequential(*layers), nn.Identity()
    hidden = settings["predictor"]
    predictor = nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )
    return nn.Sequential(*layers), predictor


class _Tower:
    """One tower: f, its projector, h, and SGD over them, or the optimizer of a table.

    ``released``: gradients are clipped at 5. ``annealed``: the rate of h falls, too.
    """

    def __init__(
        self,
        encoder: nn.Module,
        heads: tuple[nn.Module, nn.Module],
        lr: float,
        table: dict[str, Any],
        epochs: int,
        released: bool,
        annealed: bool,
    ) -> None:
        self.released, self.annealed = released, annealed
        self.encoder, (self.projector, self.predictor) = encoder, heads
        self.parts = nn.ModuleDict(
            {"encoder": encoder, "projector": heads[0], "predictor": heads[1]}
        )
        self.lr = lr
        self.own = Updates(table, list(self.parts.parameters()), epochs) if table else None
        below = [*encoder.parameters(), *self.projector.parameters()]
        rest = [*self.predictor.parameters()]
        self.optimizer = torch.optim.SGD(
            [{"params": below}, *([{"params": rest}] if rest else [])],
            lr=lr,
            momentum=SGD_MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def z(self, inputs: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.projector(self.encoder(*inputs))
        return out

    def update(self, loss: Tensor) -> None:
        if self.own is not None:
            self.own.by(loss)
            return
        self.optimizer.zero_grad()
        loss.backward()
        if self.released:
            clip_gradients(list(self.parts.parameters()), 5.0)
        self.optimizer.step()

    def anneal(self, epoch: int, epochs: int) -> None:
        """Sets the rate of an epoch that begins."""
        if self.own is not None:
            if epoch:
                self.own.end_epoch()
            return
        for group in self.optimizer.param_groups[: None if self.annealed else 1]:
            group["lr"] = self.lr * (1 + math.cos(math.pi * epoch / epochs)) / 2


class _Queue:
    """The newest unit keys, each in the place of the oldest; kept simple on purpose."""

    def __init__(self, size: int, width: int, seed: int, device: str) -> None:
        random = torch.Generator().manual_seed(seed)
        self.keys = F.normalize(torch.randn(size, width, generator=random), dim=1).to(device)
        self.pushed = 0

    def push(self, keys: Tensor) -> None:
        # The loss before may still need the earlier ones.
        self.keys = self.keys.clone()
        for key in F.normalize(keys.detach(), dim=1):
            self.keys[self.pushed % len(self.keys)] = key
            self.pushed += 1


class _Party:
    def __init__(
        self,
        recipe: Recipe,
        name: str,
        data: DataSettings,
        phase: str,
        settings: dict[str, Any],
        device: str,
    ) -> None:
        self.device = device
        self.name, self.settings, self.recipe, self.phase = name, settings, recipe, phase
        place = present(recipe.party(name))
        kind = place.encoder or recipe.model.encoder
        table = load_table(data, with_label=place.role == "active")
        rows = recipe.rows
        self.splits = split_rows(
            recipe.seed,
            len(table.ids),
            validation=rows.validation,
            test=rows.test,
            aligned=rows.aligned,
        )
        released = recipe.preset == "released"
        all_rows = settings.get("local_rows", "all") == "all"
        self.own_rows = self.splits["local" if all_rows else "aligned"]
        fitted = Preprocessor.fit(
            table,
            self.splits["local"],
            one_hot=kind.kind != "tabular",
            flatten=kind.kind in ("mlp", "tabular"),
            settings=data,
        )
        self.features = fitted.transform(table).to(device)
        self.augment = make_augment(
            AugmentSettings(**((RELEASED if released else {}) | settings.get("augment", {}))),
            self.features,
            self.own_rows,
        )
        gamma, size = settings["gamma"], recipe.model.embedding_size
        lr = 0.05 * settings["batch_size"] / 256 * 0.5 / (0.5 + gamma)

        def tower(label: str, *owner: str) -> _Tower:
            with seed_torch(derive_seed(recipe.seed, "init", *owner, label)):
                encoder = build_encoder(kind, self.features.spec, size)
            with seed_torch(derive_seed(recipe.seed, "init", phase, *owner, label)):
                heads = _heads(settings, size)
            epochs = settings["rounds"] * settings.get(f"{label}_epochs", 1)
            annealed = settings.get("anneal_predictor", not released)
            own = own_table(settings, name, {})
            projector, predictor = (each.to(device) for each in heads)
            both = projector, predictor
            return _Tower(encoder.to(device), both, lr, own, epochs, released, annealed)

        self.cross = tower("cross", name)
        # Averaged later, so it begins alike at all parties.
        self.local = tower("local")
        # For BYOL and MoCo.
        self.target = deepcopy(self.local)
        self.queues: dict[str, _Queue] = {}
        # With error feedback: what was not sent.
        self.left: dict[str, Tensor] = {}

    def queue(self, label: str) -> _Queue:
        if label not in self.queues:
            seed = derive_seed(self.recipe.seed, "queue", self.phase, self.name, label)
            # Without a projector the loss sees embeddings.
            width = [self.recipe.model.embedding_size, *self.settings["projector"]][-1]
            self.queues[label] = _Queue(self.settings["queue"], width, seed, self.device)
        return self.queues[label]

    def loss(self, p: Tensor, z: Tensor, negatives: _Queue | None) -> Tensor:
        """Returns L_SSL(p, st(z)): Eq. 4 (SimSiam), Eq. 3 (BYOL), Eq. 2 (MoCo)."""
        if self.settings["ssl"] == "simsiam":
            return -F.cosine_similarity(p, z.detach(), dim=1).mean()
        if self.settings["ssl"] == "byol":
            return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=1).mean()
        p, z = F.normalize(p, dim=1), F.normalize(z.detach(), dim=1)
        positive = (p * z).sum(dim=1, keepdim=True)
        logits = (
            torch.cat([positive, p @ present(negatives).keys.T], dim=1)
            / self.settings["temperature"]
        )
        return F.nll_loss(
            logits.log_softmax(dim=1), torch.zeros(len(p), dtype=torch.int64, device=p.device)
        )

    # -- Step 1
    # ----------------------------------------------------------------------

    def update_cross(
        self, inputs: tuple[Tensor, ...], z: Tensor, received: dict[str, Tensor]
    ) -> None:
        for update in range(self.settings["local_updates"]):
            z = z if update == 0 else self.cross.z(inputs)
            p = self.cross.predictor(z)
            losses = [
                self.loss(p, other, self.cross_queue(peer)) for peer, other in received.items()
            ]
            # Eq. 5.
            self.cross.update(sum(losses[1:], losses[0]) / len(losses))
        for peer, other in received.items():
            if self.settings["ssl"] == "moco":
                self.queue(f"cross {peer}").push(other)

    def cross_queue(self, peer: str) -> _Queue | None:
        return self.queue(f"cross {peer}") if self.settings["ssl"] == "moco" else None

    # -- Step 2
    # ----------------------------------------------------------------------

    def local_epoch(self, epoch: int, epochs: int) -> None:
        """Runs lines 18 to 26."""
        ssl, size = self.settings["ssl"], self.settings["batch_size"]
        seed = self.recipe.seed
        random = torch.Generator().manual_seed(
            derive_seed(seed, "augment", self.phase, self.name, epoch)
        )
        self.local.parts.train()
        self.target.parts.train()
        self.cross.parts.eval()
        self.local.anneal(epoch, epochs)
        own = derive_seed(seed, self.name)
        for rows in batches(own, self.phase, epoch, self.own_rows, size):
            if len(rows) < size:
                continue
            # Line 19.
            v1, v2 = self.augment.two_views(self.features.inputs(rows), random)
            z1, z2 = self.local.z(v1), self.local.z(v2)
            # Line 20.
            p1, p2 = self.local.predictor(z1), self.local.predictor(z2)
            if ssl == "simsiam":
                t1, t2 = z1.detach(), z2.detach()
            else:
                with torch.no_grad():
                    # Line 21.
                    t1, t2 = self.target.z(v1), self.target.z(v2)
            with torch.no_grad():
                # Line 23.
                c1, c2 = self.cross.z(v1), self.cross.z(v2)
            keys = self.queue("local") if ssl == "moco" else None
            guide = self.queue("guide") if ssl == "moco" else None
            loss = 0.5 * (self.loss(p1, t2, keys) + self.loss(p2, t1, keys))
            # Eq. 6.
            loss = loss + self.settings["gamma"] * (
                self.loss(p1, c1, guide) + self.loss(p2, c2, guide)
            )
            # Line 25.
            self.local.update(loss)
            if ssl == "moco":
                for queue, found in ((keys, (t1, t2)), (guide, (c1, c2))):
                    for each in found:
                        present(queue).push(each)
            if ssl in ("byol", "moco"):
                self.move_target()

    @torch.no_grad()
    def move_target(self) -> None:
        momentum = self.settings["momentum"]
        for part in ("encoder", "projector"):
            pairs = zip(
                getattr(self.target, part).parameters(),
                getattr(self.local, part).parameters(),
                strict=True,
            )
            for target, online in pairs:
                # Momentum * target + (1 - momentum) * online.
                target.copy_(target.lerp(online, 1 - momentum))

    # -- Step 3
    # ----------------------------------------------------------------------

    def crossed(
        self, x: Tensor, exchange: str, way: str, sender: str, at: tuple[int, int], name: str
    ) -> Tensor:
        """Returns what is read of a tensor; with error feedback, of one to which the last error was
        added.
        """
        table = next((each for each in self.recipe.wire if each.direction in (None, way)), None)
        if table is None or not table.settings.get("error_feedback"):
            return wiring.crossed(self.recipe, self.phase, exchange, way, sender, at, name, x)
        left = self.left.get(name, torch.zeros_like(x))
        rows = x.reshape(len(x), -1) if x.dim() > 1 else x.reshape(1, -1)
        low, high = rows.min(dim=1, keepdim=True).values, rows.max(dim=1, keepdim=True).values
        wanted = (rows + left.reshape(rows.shape)).clamp(low, high).reshape(x.shape)
        read = wiring.crossed(self.recipe, self.phase, exchange, way, sender, at, name, wanted)
        self.left[name] = x - read + left
        return read

    def shared(self, top: tuple[str, ...]) -> dict[str, Tensor]:
        """Returns f_lt ∘ h_l without counters."""
        wanted = (*(f"encoder.{layer}." for layer in top), "projector.", "predictor.")
        return {
            name: tensor
            for name, tensor in self.local.parts.state_dict().items()
            if name.startswith(wanted) and not name.endswith("num_batches_tracked")
        }


def pretrain(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    top: tuple[str, ...],
    device: str = "cpu",
) -> list[dict[str, dict[str, Tensor]]]:
    """Returns, for each round, {party: {"cross.encoder.…", "local.projector.…": tensor}} after it.

    Args:
        recipe_tables: the recipe as in TOML; its first phase is of kind ``fedhssl`` and names every
            value it uses.
        data: {party: its [data] table}.
        top: names of the encoder's layers that are averaged.
        device: where all is computed.
    """
    recipe = Recipe.model_validate(recipe_tables)
    phase = recipe.phases[0]
    settings = phase.settings
    with one_thread():
        parties = [
            _Party(
                recipe, party.name, DataSettings(**data[party.name]), phase.name, settings, device
            )
            for party in recipe.parties
        ]
        snapshots = []
        for round_ in range(settings["rounds"]):
            for each in range(cross_epochs := settings.get("cross_epochs", 1)):
                epoch = round_ * cross_epochs + each
                _cross_epoch(
                    recipe, phase.name, parties, epoch, settings, cross_epochs * settings["rounds"]
                )
            # Line 17.
            for party in parties:
                for each in range(local_epochs := settings.get("local_epochs", 1)):
                    party.local_epoch(
                        round_ * local_epochs + each, local_epochs * settings["rounds"]
                    )
            _aggregate(parties, top, phase.name, round_)
            snapshots.append({party.name: _snapshot(party) for party in parties})
    return snapshots


def _cross_epoch(
    recipe: Recipe,
    phase: str,
    parties: list[_Party],
    epoch: int,
    settings: dict[str, Any],
    epochs: int,
) -> None:
    """Runs lines 4 to 15: all compute z, then all update."""
    active = next(party for party in parties if party.name == recipe.active.name)
    for party in parties:
        party.cross.parts.train()
        party.cross.anneal(epoch, epochs)
    for rows in batches(
        recipe.seed, phase, epoch, active.splits["aligned"], settings["batch_size"]
    ):
        if len(rows) < settings["batch_size"]:
            continue
        inputs = {party.name: party.features.inputs(rows) for party in parties}
        # Line 6.
        z = {party.name: party.cross.z(inputs[party.name]) for party in parties}
        # Lines 8 and 10.
        sent = {name: each.detach() for name, each in z.items()}
        for party in parties:
            peers = (
                [other.name for other in parties if other is not active]
                if party is active
                else [active.name]
            )
            party.update_cross(
                inputs[party.name], z[party.name], {peer: sent[peer] for peer in peers}
            )


@torch.no_grad()
def _aggregate(parties: list[_Party], top: tuple[str, ...], phase: str, round_: int) -> None:
    """Runs lines 28 to 34. With a codec, the server sums in the roster's order, in float32:
    rounding needs the same.
    """
    shared, recipe = [party.shared(top) for party in parties], parties[0].recipe
    for name in shared[0]:
        mean = torch.stack([each[name] for each in shared]).mean(dim=0)
        if recipe.wire:
            read = [
                party.crossed(each[name], "weights", "up", party.name, (round_, 0), name)
                for party, each in zip(parties, shared, strict=True)
            ]
            mean = reduce(torch.add, read) / len(read)
            mean = wiring.crossed(
                recipe, phase, "weights", "down", "server", (round_, 0), name, mean
            )
        for each in shared:
            each[name].copy_(mean)


def _snapshot(party: _Party) -> dict[str, Tensor]:
    towers = {"cross": party.cross, "local": party.local}
    return {
        f"{label}.{name}": tensor.clone()
        for label, each in towers.items()
        for name, tensor in each.parts.state_dict().items()
    }
