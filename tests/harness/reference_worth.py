"""What each party is worth, in one process and from the definitions.

A set of parties S has the quality v(S) of the model when the embedding of each party outside S is
the mean of its embeddings of the training rows, or zeros. The Shapley value of a party (Shapley
1953) is what it adds to the parties before it, in the mean over all orders of the parties, one by
one. It shares no code with the phase.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.harness.reference import one_thread, top_of, trained
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import derive_seed, draw_permutation

Quality = Callable[[Tensor, Tensor], float]


def qualities(
    tables: dict[str, Any], data: dict[str, Any], absent: str, quality: Quality
) -> dict[tuple[frozenset[str], str], float]:
    """Returns {(parties, split): quality}; ``quality``: of outputs and targets. The recipe's first
    phase trains.
    """
    recipe, parties = Recipe.model_validate(tables), trained(tables, data)
    active = parties[recipe.active.name]
    there = {name: party for name, party in parties.items() if party.features is not None}
    for party in parties.values():
        party.models.eval()
    found = {}
    with one_thread(), torch.no_grad():
        for split in ("validation", "test"):
            rows = active.splits[split]
            z = {name: party.embed(rows) for name, party in there.items()}
            gone = {name: party.embed(active.splits["train"]) for name, party in there.items()}
            stand_ins = {
                name: each.mean(dim=0) if absent == "mean" else torch.zeros(each.shape[1])
                for name, each in gone.items()
                if each is not None
            }
            for members in itertools.product([False, True], repeat=len(there)):
                chosen = frozenset(itertools.compress(there, members))
                # Without parties there is one output for all rows.
                n = len(rows) if chosen else 1
                used = [
                    each if name in chosen else stand_ins[name].repeat(n, 1)
                    for name, each in z.items()
                    if each is not None
                ]
                outputs = top_of(active, recipe.model.combine, used)
                outputs = outputs.expand(len(rows), -1)
                found[chosen, split] = quality(outputs, active.targets[torch.from_numpy(rows)])
    return found


def changes(
    tables: dict[str, Any], data: dict[str, Any], repeats: int, quality: Quality
) -> dict[str, list[list[float]]]:
    """Returns {party: for each of its columns, what its permutation costs on the validation rows,
    in each repeat}: permutation importance (Breiman 2001). All columns are numbers.
    """
    recipe, parties = Recipe.model_validate(tables), trained(tables, data)
    active, phase = parties[recipe.active.name], recipe.phases[1].name
    rows, rule = active.splits["validation"], recipe.model.combine
    targets = active.targets[torch.from_numpy(rows)]
    there = {name: party for name, party in parties.items() if party.features is not None}
    for party in parties.values():
        party.models.eval()
    found: dict[str, list[list[float]]] = {}
    with one_thread(), torch.no_grad():
        z = {name: party.embed(rows) for name, party in there.items()}
        whole = quality(
            top_of(active, rule, [each for each in z.values() if each is not None]), targets
        )
        for name, party in there.items():
            assert party.features is not None
            (x,) = party.features.inputs(rows)
            found[name] = []
            for column in range(x.shape[1]):
                costs = []
                for repeat in range(repeats):
                    seed = derive_seed(recipe.seed, "importance", phase, column, repeat)
                    other = x.clone()
                    other[:, column] = x[
                        torch.from_numpy(draw_permutation(seed, len(rows)).copy()), column
                    ]
                    mixed = {**z, name: party.models["encoder"](other)}
                    used = [each for each in mixed.values() if each is not None]
                    costs.append(whole - quality(top_of(active, rule, used), targets))
                found[name].append(costs)
    return found


def brute_force(players: Sequence[str], value: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Returns the Shapley values, over all orders of the players."""
    added = dict.fromkeys(players, 0.0)
    orders = list(itertools.permutations(players))
    for order in orders:
        for end, name in enumerate(order):
            added[name] += value[frozenset(order[: end + 1])] - value[frozenset(order[:end])]
    return {name: each / len(orders) for name, each in added.items()}
