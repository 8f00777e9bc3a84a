"""Split training with steps in flight and local updates, in one process: written from decision
0025, without a pipe.

Each party's state is explicit. An embedding is computed by a whole copy of the encoder, made at the
moment at which the party would send, and its gradient is that copy's. Micro-batches are left out on
purpose: they must change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.harness.present import present
from tests.harness.reference import OneParty, clip_gradients, loss_of, one_thread
from tests.harness.reference_sets import loss_over_sets
from tests.harness.reference_task import losses_of_rows
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches

Rows = np.ndarray[Any, Any]
Place = tuple[int, int]


def train(
    recipe_tables: dict[str, Any], data: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Returns {party: {"encoder.…": tensor}} after the recipe's first phase, of kind
    ``splitnn``.
    """
    recipe = Recipe.model_validate(recipe_tables)
    with one_thread():
        run = _Run(recipe, data)
        for number, steps in enumerate(_rounds(recipe, run.active)):
            run.round(number, steps)
    return {name: dict(party.models.state_dict()) for name, party in run.parties.items()}


def _rounds(recipe: Recipe, active: OneParty) -> Iterator[list[tuple[int, Rows]]]:
    """Yields each round's (epoch, rows) of its batches: ``validate_every`` epochs, in parts of
    ``checkpoint_steps``.
    """
    settings = recipe.phases[0].settings
    every, most = settings.get("validate_every", 1), settings.get("checkpoint_steps", 2000)
    for first in range(0, settings["epochs"], every):
        steps = [
            (epoch, rows)
            for epoch in range(first, min(first + every, settings["epochs"]))
            for rows in batches(
                recipe.seed,
                recipe.phases[0].name,
                epoch,
                active.splits["train"],
                settings.get("batch_size", 64),
            )
        ]
        yield from (steps[begin : begin + most] for begin in range(0, len(steps), most))


class _Run:
    def __init__(self, recipe: Recipe, data: dict[str, dict[str, Any]]) -> None:
        self.recipe, self.settings = recipe, recipe.phases[0].settings
        self.optimizer = self.settings.get("optimizer", {})
        self.parties = {
            party.name: OneParty(
                recipe, party.name, DataSettings(**data[party.name]), self.optimizer, {}
            )
            for party in recipe.parties
        }
        self.active = self.parties[recipe.active.name]
        self.passives = {
            name: party for name, party in self.parties.items() if party is not self.active
        }
        # What the last update added to a party's parameters.
        self.last: dict[str, list[Tensor]] = {}
        # All exchanges: round and batch, rows, {z}, {dz}.
        self.past: list[tuple[Place, Rows, dict[str, Tensor], dict[str, Tensor]]] = []

    def round(self, number: int, steps: list[tuple[int, Rows]]) -> None:
        in_flight = self.settings.get("in_flight", 1)
        # Of each batch: {party: (its encoder then, z)}.
        sent: list[dict[str, tuple[nn.Module, Tensor]]] = []
        for party in self.parties.values():
            party.models.train()
        for t, (epoch, rows) in enumerate(steps):
            while len(sent) < min(len(steps), t + in_flight):
                ahead = len(sent) - t if self.settings.get("predict_weights") else 0
                sent.append(
                    {
                        name: _embed(party, steps[len(sent)][1], ahead, self.last.get(name, []))
                        for name, party in self.passives.items()
                    }
                )
            self._rate(epoch)
            z = {name: each.detach() for name, (_, each) in sent[t].items()}
            dz = self._update_active((number, t), rows, z)
            for name, (encoder, each) in sent[t].items():
                gradients = torch.autograd.grad(each, list(encoder.parameters()), dz[name])
                parameters = list(self.passives[name].models.parameters())
                before = [each.detach().clone() for each in parameters]
                self._update(self.passives[name], dict(zip(parameters, gradients, strict=True)))
                self.last[name] = [
                    after.detach() - each for after, each in zip(parameters, before, strict=True)
                ]
            self.past.append(((number, t), rows, z, dz))
            self._local_updates()

    def _local_updates(self) -> None:
        cache = self.settings.get("cache")
        if cache is None:
            for _ in range(self.settings.get("local_updates", 1) - 1):
                self._local_update(len(self.past) - 1, None)
            return
        w, r, t = cache.get("batches", 5), cache.get("uses", 5), len(self.past) - 1
        for j in range(t * r, t * r + r):
            held = [s for s in range(max(0, t - w + 1), t + 1) if s % w == j % w]
            if held:
                self._local_update(held[0], cache.get("threshold", 0.5))

    def _local_update(self, s: int, threshold: float | None) -> None:
        place, rows, z, dz = self.past[s]
        self._update_active(place, rows, z, dz, threshold)
        for name, party in self.passives.items():
            now = present(party.embed(rows))
            weights = _cosines(now.detach(), z[name], threshold)
            parameters = list(party.models.parameters())
            gradients = torch.autograd.grad(now, parameters, weights.unsqueeze(1) * dz[name])
            self._update(party, dict(zip(parameters, gradients, strict=True)))

    def _update_active(
        self,
        place: Place,
        rows: Rows,
        z: dict[str, Tensor],
        stale: dict[str, Tensor] | None = None,
        threshold: float | None = None,
    ) -> dict[str, Tensor]:
        """Updates the active party; returns d loss / d z of the mean over the rows. ``stale``:
        those exchanged.
        """
        leaves = {name: each.clone().requires_grad_() for name, each in z.items()}
        own = self.active.embed(rows)
        targets, of_rows = self.active.wanted(rows)

        def loss_of_set(embeddings: list[Tensor]) -> Tensor:
            with self.active.own_random_numbers():
                outputs = self.active.models["top"](self._combine(embeddings))
            if threshold is None:
                return loss_of(self.recipe, outputs, targets, of_rows)
            each = losses_of_rows(self.recipe.task, outputs, targets)
            return each if of_rows is None else each * of_rows

        loss = loss_over_sets(self.recipe, self.active.models, place, own, leaves, loss_of_set)
        found = torch.autograd.grad(
            loss.mean(), list(leaves.values()), retain_graph=True, materialize_grads=True
        )
        if threshold is not None and stale is not None:
            weights = _cosines(
                torch.cat(found, dim=1),
                torch.cat([stale[name] for name in leaves], dim=1),
                threshold,
            )
            loss = (weights * loss).mean()
        parameters = list(self.active.models.parameters())
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        self._update(self.active, dict(zip(parameters, gradients, strict=True)))
        return dict(zip(leaves, found, strict=True))

    def _combine(self, embeddings: list[Tensor]) -> Tensor:
        rule = self.recipe.model.combine
        if rule == "concat":
            return torch.cat(embeddings, dim=1)
        return reduce(torch.add, embeddings) / (len(embeddings) if rule == "mean" else 1)

    def _update(self, party: OneParty, gradients: Mapping[Tensor, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
        if "clip_norm" in self.optimizer:
            clip_gradients(list(party.models.parameters()), self.optimizer["clip_norm"])
        party.optimizer.step()

    def _rate(self, epoch: int) -> None:
        if self.optimizer.get("schedule") != "cosine":
            return
        rate = (
            self.optimizer.get("lr", 1e-3)
            * (1 + math.cos(math.pi * epoch / self.settings["epochs"]))
            / 2
        )
        for party in self.parties.values():
            for group in party.optimizer.param_groups:
                group["lr"] = rate


def _embed(party: OneParty, rows: Rows, ahead: int, last: list[Tensor]) -> tuple[nn.Module, Tensor]:
    """Returns a copy of a party's encoder, and its embeddings. The original's statistics move on as
    the copy's do.

    The copy is ``ahead`` updates like the ``last`` one further on.
    """
    encoder = deepcopy(party.models["encoder"])
    if ahead and last:
        with torch.no_grad():
            for parameter, change in zip(encoder.parameters(), last, strict=True):
                parameter.add_(change, alpha=ahead)
    with party.own_random_numbers():
        z: Tensor = encoder(*present(party.features).inputs(rows))
    for name, value in encoder.named_buffers():
        party.models["encoder"].get_buffer(name).copy_(value)
    return encoder, z


def _cosines(now: Tensor, stale: Tensor, threshold: float | None) -> Tensor:
    """Returns each row's weight: 1 without a threshold, else the cosine of its two vectors, 0 below
    the threshold.
    """
    if threshold is None:
        return torch.ones(len(now))
    found = [
        sum(a * b for a, b in zip(x, y, strict=True))
        / ((math.hypot(*x) * math.hypot(*y)) or math.inf)
        for x, y in zip(now.tolist(), stale.tolist(), strict=True)
    ]
    return torch.tensor([each if each >= threshold else 0.0 for each in found])
