"""Split training in one process, from the paper's definition: the reference of the exactness tests.

SplitNN (Vepakomma et al. 2018): every party k has an encoder, z_k = f_k(x_k); the active party
combines the z_k, its top model g gives the outputs, one loss is taken; each party's optimizer
updates its own parameters with its part of the gradient. Here it is ordinary autograd through the
whole network: nothing is cut, sent or received. It shares no code with the transport, the phases,
the runner or ``vfl_party.models.training``, and uses torch's optimizers unchanged. It shares what both
must start from: the models as built, the seeds, the tables and their preprocessing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import lr_scheduler as schedules

from tests.harness import wiring
from tests.harness.reference_sets import loss_over_sets, vectors_of, zero_gradients
from tests.harness.reference_task import losses_of_rows, weights_of_rows
from vfl_common.config.data import DataSettings
from vfl_common.config.models import Combine
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.models import build_encoder, build_top, generator, needs_codes, seed_torch
from vfl_party.models.top import AttentionPooling


class OneParty:
    """A party's data, models, optimizer, and its own stream of random numbers (for dropout)."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        data: DataSettings,
        settings: dict[str, Any],
        splits: Mapping[str, Any],
        views: Mapping[str, Any] = MappingProxyType({}),
        device: str = "cpu",
    ) -> None:
        place, self.name = recipe.party(name), name
        self._views, self._root = views, recipe.seed
        assert place is not None
        encoder = place.encoder or recipe.model.encoder
        table = load_table(data, with_label=place.role == "active")
        rows = recipe.rows
        drawn = split_rows(
            recipe.seed,
            len(table.ids),
            validation=rows.validation,
            test=rows.test,
            folds=rows.folds,
            fold=rows.fold,
        )
        self.splits = drawn if rows.split == "random" else splits
        self.models = nn.ModuleDict()
        self.features = None
        self.weights: Tensor | None = None
        if place.features:
            fitted = Preprocessor.fit(
                table,
                self.splits["train"],
                one_hot=not needs_codes(encoder),
                flatten=encoder.kind in ("mlp", "tabular", "raw"),
                settings=data,
            )
            self.features = fitted.transform(table).to(device)
            with seed_torch(derive_seed(recipe.seed, "init", name, "encoder")):
                self.models["encoder"] = build_encoder(
                    encoder, self.features.spec, width_of(recipe, name)
                )
        if place.role == "active":
            assert table.labels is not None
            raw = table.labels
            others = [name for name in data.beside if name != data.weight]
            if others:
                raw = np.stack([raw, *(table.beside[each] for each in others)], axis=1)
            labels = Labels.fit(
                raw, recipe.task, self.splits["train"], source="reference", names=data.labels
            )
            self.targets = labels.encode(raw).to(device)
            column = table.beside[data.weight] if data.weight is not None else None
            self.weights = weights_of_rows(recipe, raw, column, self.splits["train"])
            inputs = recipe.model.embedding_size
            if recipe.model.combine == "concat":
                inputs = sum(
                    width_of(recipe, each.name) for each in recipe.parties if each.features
                )
            with seed_torch(derive_seed(recipe.seed, "init", name, "top")):
                attends = recipe.model.combine == "attention"
                first = [AttentionPooling(inputs)] if attends else []
                top = build_top(recipe.model.top, inputs, recipe.task.outputs)
                self.models["top"] = nn.Sequential(*first, top) if first else top
            vectors = vectors_of(recipe, width_of)
            if vectors is not None:
                self.models["stand_ins"] = vectors
        self.models.to(device)
        self._random = (
            torch.Generator().manual_seed(derive_seed(recipe.seed, "torch", name)).get_state()
        )
        self.optimizer = optimizer_of(settings, list(self.models.parameters()))

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield
            self._random = torch.get_rng_state()

    def wanted(self, rows: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor | None]:
        """Returns the targets of rows, and their weights, if they differ."""
        at = torch.from_numpy(rows)
        return self.targets[at], None if self.weights is None else self.weights[at]

    def embed(self, rows: np.ndarray[Any, Any], at: tuple[int, int] | None = None) -> Tensor | None:
        """``at``: the epoch and the batch, in training."""
        if self.features is None:
            return None
        inputs = self.features.inputs(rows)
        if self._views and at is not None:
            inputs = (self._view(inputs[0], at), *inputs[1:])
        with self.own_random_numbers():
            z: Tensor = self.models["encoder"](*inputs)
        return z

    def _view(self, x: Tensor, at: tuple[int, int]) -> Tensor:
        """Mirrors images, or replaces numbers by those of the same column in training rows."""
        assert self.features is not None
        random = generator(derive_seed(self._root, "augment", "splitnn", self.name, *at))
        if x.dim() == 4:
            mirrored = torch.rand(len(x), 1, 1, 1, generator=random) < self._views["flip"]
            return torch.stack(
                [each.flip(2) if flag else each for each, flag in zip(x, mirrored, strict=True)]
            )
        replaced = torch.rand(x.shape, generator=random) < self._views["corruption"]
        pool = torch.as_tensor(self.splits["train"])
        others = pool[torch.randint(len(pool), x.shape, generator=random)]
        view = x.clone()
        for row, column in replaced.nonzero().tolist():
            view[row, column] = self.features.x[others[row, column], column]
        return view


def width_of(recipe: Recipe, name: str) -> int:
    """Returns the width of a party's embedding."""
    return next(
        each.embedding_size or recipe.model.embedding_size
        for each in recipe.parties
        if each.name == name
    )


def optimizer_of(settings: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer that a phase's table asks for."""
    kind, lr, decay = (
        settings.get("kind", "adam"),
        settings.get("lr", 1e-3),
        settings.get("weight_decay", 0.0),
    )
    if kind == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, momentum=settings.get("momentum", 0.0), weight_decay=decay
        )
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=decay)
    return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)


def own_tables(
    optimizer: dict[str, Any], settings: dict[str, Any], names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns {party: the optimizer's table that is for it}."""
    return {name: own_table(settings, name, optimizer) for name in names}


def own_table(settings: dict[str, Any], name: str, default: dict[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's table that is for a party."""
    found: dict[str, Any] = settings.get("optimizers", {}).get(name, default)
    return found


class Rates:
    """The learning rates of a party, by torch's own schedules: ``step`` ends an epoch, ``judge`` a
    validation.
    """

    def __init__(self, table: dict[str, Any], of: torch.optim.Optimizer, epochs: int) -> None:
        kind, warmup = table.get("schedule", "constant"), table.get("warmup_epochs", 0)
        self._falls = None
        found: list[schedules.LRScheduler] = []
        if kind == "cosine":
            cosine = partial(_cosine, epochs - warmup)
            found.append(schedules.LambdaLR(of, cosine))
        elif kind == "step":
            found.append(schedules.StepLR(of, table["step_epochs"], table.get("factor", 0.1)))
        else:
            found.append(schedules.ConstantLR(of, 1.0))
        if kind == "plateau":
            # Torch lowers the rate after more than its patience.
            patience, factor = table.get("plateau_patience", 3) - 1, table.get("factor", 0.1)
            self._falls = schedules.ReduceLROnPlateau(
                of, factor=factor, patience=patience, threshold=0.0, eps=0.0
            )
        if warmup:
            found.insert(0, schedules.LinearLR(of, 1 / (warmup + 1), 1.0, total_iters=warmup))
        self._epochs = (
            schedules.SequentialLR(of, found, milestones=[warmup]) if warmup else found[0]
        )

    def step(self) -> None:
        self._epochs.step()

    def judge(self, value: float) -> None:
        if self._falls is not None:
            self._falls.step(value)


def _cosine(epochs: int, epoch: int) -> float:
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


class Updates:
    """An optimizer of one party with all that its table says: the update, clipped, and the rates.

    ``epochs``: of the phase, each of which ends with ``end_epoch``.
    """

    def __init__(self, table: dict[str, Any], of: list[nn.Parameter], epochs: int) -> None:
        self._table, self._of, self._optimizer = table, of, optimizer_of(table, of)
        self._rates = Rates(table, self._optimizer, epochs)

    def by(self, loss: Tensor) -> None:
        """Updates the parameters by the gradient of ``loss``."""
        self._optimizer.zero_grad()
        loss.backward()
        self.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        if "clip_norm" in self._table:
            clip_gradients(self._of, self._table["clip_norm"])
        self._optimizer.step()

    def end_epoch(self) -> None:
        self._rates.step()


@dataclass
class Away:
    """When a party was absent: ``steps``, (epoch, batch).

    ``saved``, ``back``: if it was started again, the first step whose update its new process does
    not have, and the first step in which that process takes part.
    """

    steps: Collection[tuple[int, int]]
    saved: tuple[int, int] | None = None
    back: tuple[int, int] | None = None


def train(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    away: Mapping[str, Away] = MappingProxyType({}),
    splits: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> dict[str, dict[str, Tensor]]:
    """Returns {party: {"encoder.…": tensor}} after the recipe's only training phase; see
    ``trained``.
    """
    parties = trained(recipe_tables, data, away, splits, device)
    return {name: dict(party.models.state_dict()) for name, party in parties.items()}


def trained(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    away: Mapping[str, Away] = MappingProxyType({}),
    splits: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> dict[str, OneParty]:
    """Returns the parties after the recipe's only training phase.

    Args:
        recipe_tables: the recipe as in TOML; its first phase is of kind ``splitnn``.
        data: {party: its [data] table}.
        away: {party: when it was absent}; only without ``early_stopping``.
        splits: {split: row numbers}, for a recipe whose rows the active party divides.
        device: where all is computed; other than on a CPU, without dropout and weights of rows.
    """
    recipe = Recipe.model_validate(recipe_tables)
    phase = recipe.phases[0]
    settings, optimizer = phase.settings, phase.settings.get("optimizer", {})
    tables = own_tables(optimizer, settings, data)
    with one_thread():
        parties = {
            party.name: OneParty(
                recipe,
                party.name,
                DataSettings(**data[party.name]),
                tables[party.name],
                splits,
                settings.get("augment", {}),
                device,
            )
            for party in recipe.parties
        }
        if away:
            _train_without(recipe, phase.name, settings, parties, away)
        else:
            _train(recipe, phase.name, settings, tables, parties)
    return parties


@contextmanager
def one_thread() -> Iterator[None]:
    """Uses one thread, as the parties of the tests do, so that sums within an operation have the
    same order.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    recipe: Recipe,
    phase: str,
    settings: dict[str, Any],
    tables: dict[str, dict[str, Any]],
    parties: dict[str, OneParty],
) -> None:
    active = parties[recipe.active.name]
    # The active party's embedding is first; the passive parties' follow in the roster's order.
    ordered = [active, *(party for party in parties.values() if party is not active)]
    epochs = settings["epochs"]
    rates = [Rates(tables[name], party.optimizer, epochs) for name, party in parties.items()]
    stopping = settings.get("early_stopping")
    best: float | None = None
    best_weights: dict[str, Any] = {}
    since_best = 0
    for epoch in range(epochs):
        for party in ordered:
            party.models.train()
        cut = batches(
            recipe.seed, phase, epoch, active.splits["train"], settings.get("batch_size", 64)
        )
        for batch, rows in enumerate(cut):
            own, *others = _embedded(recipe, active, ordered, rows, (epoch, batch))
            loss = _joint_loss(recipe, active, rows, (epoch, batch), own, _named(ordered, others))
            for party in ordered:
                party.optimizer.zero_grad()
            loss.backward()
            for party in ordered:
                zero_gradients(party.models)
            for party in ordered:
                table = tables[party.name]
                if "clip_norm" in table:
                    clip_gradients(list(party.models.parameters()), table["clip_norm"])
                party.optimizer.step()
        for each in rates:
            each.step()
        if stopping is None:
            continue
        value = _validate(recipe, active, ordered, stopping.get("metric", "loss"))
        for each in rates:
            each.judge(-value if stopping.get("metric") == "accuracy" else value)
        better = best is None or (
            value > best if stopping.get("metric") == "accuracy" else value < best
        )
        since_best = 0 if better else since_best + 1
        if better:
            best = value
            best_weights = {
                name: deepcopy(party.models.state_dict()) for name, party in parties.items()
            }
        if since_best >= stopping.get("patience", 5):
            break
    for name, weights in best_weights.items():
        parties[name].models.load_state_dict(weights)


def _train_without(
    recipe: Recipe,
    phase: str,
    settings: dict[str, Any],
    parties: dict[str, OneParty],
    away: Mapping[str, Away],
) -> None:
    """Trains as ``_train`` does, with something in the place of absent parties' embeddings.

    An absent party's encoder gets no update. Its embedding is zero (``zeros``), or the last one of
    these rows, zero if there is none (``cached``), or left out of sum and mean (``skip``).
    """
    active, policy, rule = (
        parties[recipe.active.name],
        settings["late_policy"],
        recipe.model.combine,
    )
    ordered = [active, *(party for party in parties.values() if party is not active)]
    names = {id(party): name for name, party in parties.items()}
    last: dict[tuple[str, int], Tensor] = {}
    saved: dict[str, Any] = {}
    for epoch in range(settings["epochs"]):
        for party in ordered:
            party.models.train()
        cut = batches(
            recipe.seed, phase, epoch, active.splits["train"], settings.get("batch_size", 64)
        )
        for batch, rows in enumerate(cut):
            for name, of in away.items():
                if of.saved == (epoch, batch):
                    saved[name] = deepcopy(
                        (parties[name].models.state_dict(), parties[name].optimizer.state_dict())
                    )
                if of.back == (epoch, batch):
                    weights, moments = saved.pop(name)
                    parties[name].models.load_state_dict(weights)
                    parties[name].optimizer.load_state_dict(moments)
            gone = {name for name, of in away.items() if (epoch, batch) in of.steps}
            own, others = active.embed(rows), {}
            for party in ordered[1:]:
                name, z = names[id(party)], None
                if name not in gone:
                    z = party.embed(rows)
                elif policy == "skip" and "stand_ins" in active.models:
                    place = [each.name for each in recipe.passives].index(name)
                    z = [*active.models["stand_ins"].parameters()][place].repeat(len(rows), 1)
                elif policy == "zeros" or (policy == "skip" and rule == "concat"):
                    z = torch.zeros(len(rows), width_of(recipe, name))
                elif policy == "cached":
                    blank = torch.zeros(width_of(recipe, name))
                    z = torch.stack([last.get((name, int(row)), blank) for row in rows])
                if z is not None:
                    others[name] = z
                    if name not in gone:
                        last |= {
                            (name, int(row)): each
                            for row, each in zip(rows, z.detach(), strict=True)
                        }
            loss = _joint_loss(recipe, active, rows, (epoch, batch), own, others)
            for party in ordered:
                party.optimizer.zero_grad()
            loss.backward()
            for party in ordered:
                zero_gradients(party.models)
                if names[id(party)] not in gone:
                    party.optimizer.step()


class _Rounded(torch.autograd.Function):
    """What a codec of two bytes a number makes of an embedding, and of its gradient on the way
    back.
    """

    @staticmethod
    def forward(ctx: Any, z_BD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return z_BD.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, dz_BD: Tensor) -> tuple[Tensor, None]:
        return dz_BD.to(ctx.dtype).float(), None


def _sent(
    recipe: Recipe,
    party: OneParty,
    active: OneParty,
    z_BD: Tensor | None,
    at: tuple[int, int] | None,
) -> Tensor | None:
    phase, codec = recipe.phases[0].name, recipe.phases[0].codec
    if z_BD is not None and party is not active and recipe.wire and at is not None:
        there: Tensor = wiring.There.apply(
            z_BD,
            lambda z: wiring.crossed(recipe, phase, "embedding", "up", party.name, at, "z", z),
            lambda dz: wiring.crossed(
                recipe, phase, "embedding", "down", active.name, at, "dz", dz
            ),
        )
        return there
    if z_BD is None or party is active or codec == "identity":
        return z_BD
    rounded: Tensor = _Rounded.apply(z_BD, getattr(torch, codec))
    return rounded


def _forward(
    recipe: Recipe,
    active: OneParty,
    ordered: list[OneParty],
    rows: np.ndarray[Any, Any],
    at: tuple[int, int] | None = None,
) -> Tensor:
    sent = _embedded(recipe, active, ordered, rows, at)
    with active.own_random_numbers():
        return top_of(active, recipe.model.combine, [z for z in sent if z is not None])


def _embedded(
    recipe: Recipe,
    active: OneParty,
    ordered: list[OneParty],
    rows: np.ndarray[Any, Any],
    at: tuple[int, int] | None = None,
) -> list[Tensor | None]:
    return [_sent(recipe, party, active, party.embed(rows, at), at) for party in ordered]


def _named(ordered: list[OneParty], others: list[Tensor | None]) -> dict[str, Tensor]:
    """Returns {passive party: its embeddings}."""
    found = zip(ordered[1:], others, strict=True)
    return {party.name: z for party, z in found if z is not None}


def _joint_loss(
    recipe: Recipe,
    active: OneParty,
    rows: np.ndarray[Any, Any],
    place: tuple[int, int],
    own: Tensor | None,
    others: Mapping[str, Tensor],
) -> Tensor:
    """Returns the loss of a batch, over sets of parties if the recipe asks for that."""

    def loss(embeddings: list[Tensor]) -> Tensor:
        with active.own_random_numbers():
            outputs = top_of(active, recipe.model.combine, embeddings)
        return loss_of(recipe, outputs, *active.wanted(rows))

    return loss_over_sets(recipe, active.models, place, own, others, loss)


def top_of(active: OneParty, rule: Combine, embeddings: list[Tensor]) -> Tensor:
    """Combines the embeddings of the parties that are there, and passes them through the top."""
    top = active.models["top"]
    if rule == "concat":
        combined = torch.cat(embeddings, dim=1)
    elif rule == "max":
        combined = reduce(torch.maximum, embeddings)
    elif rule == "attention":
        assert isinstance(top, nn.Sequential)
        pooling, top = top
        combined = _attended(
            pooling.get_parameter("hidden.weight"),
            pooling.get_parameter("score.weight"),
            embeddings,
        )
    else:
        combined = reduce(torch.add, embeddings) / (len(embeddings) if rule == "mean" else 1)
    outputs: Tensor = top(combined)
    return outputs


def _attended(v_DD: Tensor, w_1D: Tensor, embeddings: list[Tensor]) -> Tensor:
    """Sums the embeddings with weights, written out (Ilse et al. 2018, Eq. 7 and 8)."""
    # softmax subtracts the largest score before exp: written out without that, a gradient that is
    # zero but for rounding becomes another one, and Adam divides it by its own size.
    scores_BK = torch.cat([torch.tanh(z @ v_DD.T) @ w_1D.T for z in embeddings], dim=1)
    a_BK = scores_BK.softmax(dim=1)
    return reduce(torch.add, [a_BK[:, k : k + 1] * z for k, z in enumerate(embeddings)])


def loss_of(
    recipe: Recipe, outputs: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Returns the task's mean loss over the rows."""
    others = ("multilabel", "survival", "ranking")
    if weights is not None or recipe.task.shaped or recipe.task.kind in others:
        each = losses_of_rows(recipe.task, outputs, targets)
        return (each if weights is None else each * weights).mean()
    if recipe.task.kind == "multiclass":
        return F.cross_entropy(outputs, targets)
    if recipe.task.kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs, targets)
    return F.mse_loss(outputs, targets)


def clip_gradients(parameters: list[nn.Parameter], most: float) -> None:
    """Scales one party's gradient to an L2 norm of at most ``most``, as torch does, which adds 1e-6
    to the norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.sqrt(
        sum((g.double().pow(2).sum() for g in gradients), torch.zeros((), dtype=torch.float64))
    ).item()
    if norm + 1e-6 > most:
        for g in gradients:
            g.mul_(most / (norm + 1e-6))


@torch.no_grad()
def _validate(recipe: Recipe, active: OneParty, ordered: list[OneParty], metric: str) -> float:
    for party in ordered:
        party.models.eval()
    rows = active.splits["validation"]
    outputs, targets = (
        _forward(recipe, active, ordered, rows),
        active.targets[torch.from_numpy(rows)],
    )
    if metric == "accuracy":
        guess = outputs.argmax(dim=1) if recipe.task.kind == "multiclass" else (outputs > 0).float()
        return (guess == targets).double().mean().item()
    if metric != "loss":
        raise ValueError(f"the reference does not know the metric {metric}")
    return loss_of(
        recipe, outputs.double(), targets if targets.dtype == torch.int64 else targets.double()
    ).item()
