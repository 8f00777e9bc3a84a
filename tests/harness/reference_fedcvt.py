"""FedCVT in one process, from the formulas of the paper and of its released code: the reference of
the exactness tests.

Nothing is sent: the whole loss is one graph, over both parties' networks. It shares no code with
the transport, the phases, the method's losses or ``vfl_party.models.training``. It shares what both
must start from: networks as built, seeds, tables, preprocessing, and the order of the rows.

A is the active party, B the passive one. U is unique, C shared, R = [U; C].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.harness.present import present
from tests.harness.reference import Updates, one_thread, own_table
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.models import build_encoder, build_top, seed_torch

Rows = np.ndarray[Any, Any]


class _Party:
    def __init__(
        self, recipe: Recipe, name: str, data: DataSettings, phase: str, settings: dict[str, Any]
    ) -> None:
        self.seed, self.name, self.phase, self.settings = recipe.seed, name, phase, settings
        place = present(recipe.party(name))
        kind, rows = place.encoder or recipe.model.encoder, recipe.rows
        table = load_table(data, with_label=place.role == "active")
        self.splits = split_rows(
            recipe.seed,
            len(table.ids),
            validation=rows.validation,
            test=rows.test,
            aligned=rows.aligned,
            labelled=rows.labelled,
        )
        fitted = Preprocessor.fit(
            table, self.splits["local"], one_hot=True, flatten=True, settings=data
        )
        self.features = fitted.transform(table)
        self.models = nn.ModuleDict()
        width, outputs = recipe.model.embedding_size, recipe.task.outputs
        for network in ("unique", "shared"):
            with seed_torch(derive_seed(recipe.seed, "init", name, network)):
                self.models[network] = build_encoder(kind, self.features.spec, width // 2)
        if place.role == "active":
            labels = Labels.fit(table.labels, recipe.task, self.splits["train"], source="reference")
            self.targets = labels.encode(present(table.labels))
            with seed_torch(derive_seed(recipe.seed, "init", name, "top")):
                self.models["top"] = build_top(recipe.model.top, 2 * width, outputs)
            for view in ("active", "passive"):
                with seed_torch(derive_seed(recipe.seed, "init", name, phase, view)):
                    self.models[view] = nn.Linear(width, outputs)
        optimizer = own_table(settings, name, settings.get("optimizer", {}))
        self.optimizer = Updates(optimizer, list(self.models.parameters()), settings["epochs"])

    def represent(self, rows: Rows) -> tuple[Tensor, Tensor]:
        inputs = self.features.inputs(rows)
        return self.models["unique"](*inputs), self.models["shared"](*inputs)

    def snapshot(self) -> dict[str, Tensor]:
        return {
            f"encoder.{name}" if name.startswith(("unique", "shared")) else name: tensor.clone()
            for name, tensor in self.models.state_dict().items()
        }

    def own(self, step: int) -> Rows:
        rows = np.array(
            sorted(set(self.splits["local"].tolist()) - set(self.splits["aligned"].tolist())),
            np.int64,
        )
        role = "active" if "top" in self.models else "passive"
        size = (
            self.settings["own_batch_size"]
            if self.settings.get("own_rows", "both") in ("both", role)
            else 0
        )
        return _going_round(
            derive_seed(self.seed, self.name), f"{self.phase} own", rows, size, step
        )

    def unlabelled(self, step: int) -> Rows:
        rows = np.array(
            sorted(set(self.splits["aligned"].tolist()) - set(self.splits["train"].tolist())),
            np.int64,
        )
        return _going_round(
            self.seed,
            f"{self.phase} unlabelled",
            rows,
            self.settings["unlabelled_batch_size"],
            step,
        )


def _going_round(seed: int, label: str, rows: Rows, size: int, step: int) -> Rows:
    if size == 0:
        return rows[:0]
    per_turn = len(rows) // size
    turn = batches(seed, label, step // per_turn, rows, size)
    return turn[step % per_turn]


def train(
    recipe_tables: dict[str, Any], data: dict[str, dict[str, Any]]
) -> tuple[list[dict[str, dict[str, Tensor]]], int]:
    """Trains the recipe's first phase, of kind ``fedcvt``.

    Returns {party: {name: tensor}} after each epoch, and how many pseudo-labels were given. The
    names are those of checkpoints; ``active.…`` and ``passive.…`` are the classifiers of one view.
    """
    recipe = Recipe.model_validate(recipe_tables)
    phase, settings = recipe.phases[0].name, recipe.phases[0].settings
    found = []
    with one_thread():
        a, b = (
            _Party(recipe, each.name, DataSettings(**data[each.name]), phase, settings)
            for each in recipe.parties
        )
        taken = step = 0
        warmup = math.floor(settings["epochs"] * settings.get("warmup", 0.1))
        for epoch in range(settings["epochs"]):
            for labelled in batches(
                recipe.seed, phase, epoch, a.splits["train"], settings["batch_size"]
            ):
                taken += _step(recipe, settings, a, b, labelled, step, epoch >= warmup)
                step += 1
            for party in (a, b):
                party.optimizer.end_epoch()
            found.append({party.name: party.snapshot() for party in (a, b)})
    return found, taken


def _step(
    recipe: Recipe,
    settings: dict[str, Any],
    a: _Party,
    b: _Party,
    labelled: Rows,
    step: int,
    warm: bool,
) -> int:
    aligned = np.concatenate([labelled, a.unlabelled(step)])
    own_a, own_b, m = a.own(step), b.own(step), len(aligned)
    (u_a, c_a), (u_b, c_b) = (
        a.represent(np.concatenate([aligned, own_a])),
        b.represent(np.concatenate([aligned, own_b])),
    )
    released = recipe.preset == "released"
    sharpen = settings.get("sharpen", 0.5 if released else 1.0)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1)
        if sharpen != 1.0:
            weights = weights ** (1 / sharpen)
            weights = weights / weights.sum(dim=1, keepdim=True)
        return weights @ v

    est_b = torch.cat([attention(u_a, u_a[:m], u_b[:m]), attention(c_a, c_b, c_b)], dim=1)
    est_a = torch.cat([attention(u_b, u_b[:m], u_a[:m]), attention(c_b, c_a, c_a)], dim=1)
    r_a, r_b = torch.cat([u_a, c_a], dim=1), torch.cat([u_b, c_b], dim=1)

    def far(x: Tensor, y: Tensor) -> Tensor:
        squares = (x - y) ** 2
        return squares.mean() if released else squares.sum() / len(x)

    def alike(u: Tensor, c: Tensor) -> Tensor:
        if released:
            return (u @ c.T).pow(2).sum().sqrt() / len(u)
        return torch.einsum("nh,nh->n", u, c).pow(2).sum() / len(u)

    terms = [
        far(c_a[:m], c_b[:m]),
        alike(u_a, c_a),
        alike(u_b, c_b),
        far(est_a[:m], r_a[:m]),
        far(est_b[:m], r_b[:m]),
    ]
    names = ("shared", "overlap_active", "overlap_passive", "estimate_active", "estimate_passive")
    weights = [settings.get("lambdas", {}).get(name, 0.1 if released else 0.001) for name in names]
    # Each row's view of A, view of B, its label if there is one, and the classifiers that learn
    # from it.
    all_three, of_a, of_b = ("both", "active", "passive"), ("both", "active"), ("both", "passive")
    y = a.targets[torch.from_numpy(labelled)]
    rows: list[tuple[Tensor, Tensor, Tensor | None, tuple[str, ...]]]
    rows = [(r_a[i], r_b[i], y[i] if i < len(y) else None, all_three) for i in range(m)]
    rows += [(r_a[i], est_b[i], None, of_a) for i in range(m, len(r_a))]
    rows += [(est_a[i], r_b[i], None, of_b) for i in range(m, len(r_b))]
    learns: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in all_three}
    taken = 0
    for of_row_a, of_row_b, label, learners in rows:
        views = {"both": torch.cat([of_row_a, of_row_b]), "active": of_row_a, "passive": of_row_b}
        outputs = {
            name: a.models["top" if name == "both" else name](view) for name, view in views.items()
        }
        if label is None and warm:
            label = _pseudo(
                recipe, [out.detach() for out in outputs.values()], settings.get("threshold", 0.5)
            )
            taken += label is not None
        if label is not None:
            for name in learners:
                learns[name].append((outputs[name], label))
    loss = sum((w * term for w, term in zip(weights, terms, strict=True)), torch.zeros(()))
    for pairs in learns.values():
        outputs_, labels = (
            torch.stack([out for out, _ in pairs]),
            torch.stack([label for _, label in pairs]),
        )
        if recipe.task.kind == "binary":
            loss = loss + F.binary_cross_entropy_with_logits(outputs_, labels)
        else:
            loss = loss + F.cross_entropy(outputs_, labels)
    for party in (a, b):
        party.optimizer.zero_grad()
    loss.backward()
    for party in (a, b):
        party.optimizer.step()
    return taken


def _pseudo(recipe: Recipe, outputs: list[Tensor], threshold: float) -> Tensor | None:
    """Returns the class that all three name with a probability above the threshold; None if there
    is none.
    """
    named = set()
    for out in outputs:
        if recipe.task.kind == "binary":
            p = out.sigmoid().item()
            best, at = max((1 - p, 0), (p, 1))
        else:
            best, at = max((p, at) for at, p in enumerate(out.softmax(dim=0).tolist()))
        named.add(at if best > threshold else None)
    (found,) = named if len(named) == 1 else (None,)
    if found is None:
        return None
    return torch.tensor([float(found)]) if recipe.task.kind == "binary" else torch.tensor(found)
