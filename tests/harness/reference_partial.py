"""Split training of rows that some parties do not hold, in one process, row by row: the reference of
``rows.partial``.

The loss of a batch of B rows is Σ_b ℓ_b / B. A row b that the set K_b of parties holds counts
ℓ_b = ℓ(K_b), with the head on the combination of the embeddings of K_b; with zeros for the others in a
concatenation, and the learnt vectors with party dropout. With ``subsets`` (LASER-VFL, arXiv
2410.22564) ℓ_b = Σ_k C(|K_b| - 1, k - 1) / k · ℓ(S_k), S_k drawn from the sets of k parties in K_b that
hold the active one. A party that holds no row of a batch has no update.

Who holds a row is found by plain operations on sets. Shared with the program are models as built,
seeds, preprocessing, and the secret order of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.harness import reference
from tests.harness.reference_sets import loss_over_sets, vectors_of, zero_gradients
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.align.partial import order_rows
from vfl_party.base.seeds import batches, derive_seed
from vfl_party.data import Labels, Preprocessor, Table, load_table
from vfl_party.models import build_encoder, build_top, seed_torch
from vfl_party.models.top import AttentionPooling


class Rows:
    """All rows of a run, in the order that its parties use: who holds each, and its split."""

    def __init__(self, recipe: Recipe, data: dict[str, dict[str, Any]]) -> None:
        active = recipe.active.name
        self.tables = {
            name: load_table(DataSettings(**each), with_label=name == active)
            for name, each in data.items()
        }
        ids = {name: set(table.ids) for name, table in self.tables.items()}
        table = self.tables[active]
        held = {
            name: np.array([each in ids[name] for each in table.ids])
            for name in ids
            if name != active
        }
        anyone = np.logical_or.reduce(list(held.values()))
        aligned = order_rows(recipe, table, anyone, held, divides=True)
        assert aligned.held is not None
        self.ids, self.splits = list(aligned.ids), aligned.held.splits
        self.holders = [{name for name in ids if each in ids[name]} for each in self.ids]

    def mine(self, name: str) -> Table:
        """Returns the rows of a party, in the order of all."""
        place = {each: at for at, each in enumerate(self.tables[name].ids)}
        rows = [place[each] for each in self.ids if each in place]
        return self.tables[name].select(np.array(rows, np.int64))


class OnePartialParty:
    """A party's rows, models and optimizer."""

    def __init__(
        self, recipe: Recipe, name: str, data: DataSettings, rows: Rows, optimizer: dict[str, Any]
    ) -> None:
        table = rows.mine(name)
        self.place = {each: at for at, each in enumerate(table.ids)}
        local = {rows.ids[row] for row in rows.splits["local"]}
        fitted = np.array([at for each, at in self.place.items() if each in local])
        features = Preprocessor.fit(
            table, fitted, one_hot=True, flatten=True, settings=data
        ).transform(table)
        self._x: Tensor = features.inputs(np.arange(len(table), dtype=np.int64))[0]
        self.models = nn.ModuleDict()
        with seed_torch(derive_seed(recipe.seed, "init", name, "encoder")):
            self.models["encoder"] = build_encoder(
                recipe.model.encoder, features.spec, reference.width_of(recipe, name)
            )
        if name == recipe.active.name:
            train = {rows.ids[row] for row in rows.splits["train"]}
            assert table.labels is not None
            labelled = np.array([at for each, at in self.place.items() if each in train])
            labels = Labels.fit(table.labels, recipe.task, labelled, source="reference")
            self.targets = labels.encode(table.labels)
            sizes = [reference.width_of(recipe, each.name) for each in recipe.parties]
            width = sum(sizes) if recipe.model.combine == "concat" else sizes[0]
            with seed_torch(derive_seed(recipe.seed, "init", name, "top")):
                attends = recipe.model.combine == "attention"
                first = [AttentionPooling(width)] if attends else []
                top = build_top(recipe.model.top, width, recipe.task.outputs)
                self.models["top"] = nn.Sequential(*first, top) if first else top
            vectors = vectors_of(recipe, reference.width_of)
            if vectors is not None:
                self.models["stand_ins"] = vectors
        self.optimizer = reference.optimizer_of(optimizer, list(self.models.parameters()))

    def embed(self, row: str) -> Tensor:
        """Returns the embedding of one row, [1, D]."""
        at = self.place[row]
        z: Tensor = self.models["encoder"](self._x[at : at + 1])
        return z


def train(tables: dict[str, Any], data: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Returns {party: {"encoder.…": tensor}} after the recipe's first phase, of kind ``splitnn`` or
    ``head``. With the latter only the active party trains, its top model alone.
    """
    recipe = Recipe.model_validate(tables)
    phase = recipe.phases[0]
    with reference.one_thread():
        rows = Rows(recipe, data)
        optimizer = phase.settings.get("optimizer", {})
        parties = {
            name: OnePartialParty(recipe, name, DataSettings(**each), rows, optimizer)
            for name, each in data.items()
        }
        _train(recipe, rows, parties)
    return {name: dict(party.models.state_dict()) for name, party in parties.items()}


def _train(recipe: Recipe, rows: Rows, parties: dict[str, OnePartialParty]) -> None:
    phase = recipe.phases[0]
    upload, train = phase.kind == "head", rows.splits["train"]
    # A head counts the training rows, and all its steps.
    numbers, step = np.arange(len(train)) if upload else train, 0
    for epoch in range(phase.settings["epochs"]):
        size = phase.settings["batch_size"]
        for number, batch in enumerate(batches(recipe.seed, phase.name, epoch, numbers, size)):
            chosen = train[batch] if upload else batch
            place = (step,) if upload else (epoch, number)
            loss = sum(_loss(recipe, rows, parties, int(row), place) for row in chosen)
            assert isinstance(loss, Tensor)
            for party in parties.values():
                party.optimizer.zero_grad()
            (loss / len(chosen)).backward()
            step += 1
            there = set.union(*(rows.holders[row] for row in chosen))
            for name, party in parties.items():
                if upload:
                    party.models["encoder"].zero_grad()
                if name not in there or (upload and name != recipe.active.name):
                    continue
                trained = [key for key in party.models if not (upload and key == "encoder")]
                for key in trained:
                    zero_gradients(nn.ModuleDict({key: party.models[key]}))
                party.optimizer.step()


def _loss(
    recipe: Recipe,
    rows: Rows,
    parties: dict[str, OnePartialParty],
    row: int,
    place: tuple[int, ...],
) -> Tensor:
    """Returns what one row counts."""
    active, id_, holders = parties[recipe.active.name], rows.ids[row], rows.holders[row]
    z = {name: party.embed(id_) for name, party in parties.items() if name in holders}
    own = z.pop(recipe.active.name)
    target = active.targets[active.place[id_]][None]

    def loss(embeddings: list[Tensor]) -> Tensor:
        outputs = reference.top_of(active, recipe.model.combine, embeddings)  # type: ignore[arg-type]
        return reference.loss_of(recipe, outputs, target)

    passives = [party.name for party in recipe.passives]
    if recipe.phases[0].settings.get("party_dropout"):
        vectors = dict(active.models["stand_ins"].named_parameters())
        z = {name: z.get(name, vectors[f"vectors.{at}"][None]) for at, name in enumerate(passives)}
        return loss_over_sets(recipe, active.models, place, own, z, loss)
    if recipe.model.combine == "concat":
        widths = {name: reference.width_of(recipe, name) for name in passives}
        z = {name: z.get(name, torch.zeros(1, widths[name])) for name in passives}
    # Of all rows that the same parties hold, one draw.
    return loss_over_sets(recipe, active.models, (*place, *z), own, z, loss)  # type: ignore[arg-type]
