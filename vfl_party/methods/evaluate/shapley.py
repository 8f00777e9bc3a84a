"""Shapley values of parties (Shapley 1953), from the qualities of sets of parties.

A party's value is what it adds to the quality of the parties before it, in the mean over all orders
of the parties. Qualities are numbers, or arrays of them: of the rows as they are, and of rows that
were drawn anew, so that the values have an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Players = frozenset[str]
Qualities = Mapping[Players, npt.NDArray[np.float64]]
# Parties whose sets are all measured: 64 sets.
MOST_EXACT = 6


def all_sets(players: Sequence[str]) -> list[Players]:
    """Returns all sets of players, small ones first: 2^K of them."""
    sizes = range(len(players) + 1)
    return [frozenset(each) for size in sizes for each in itertools.combinations(players, size)]


def some_sets(players: Sequence[str], orders: Iterable[Sequence[str]]) -> list[Players]:
    """Returns, small ones first: no player, each alone, all but one, all, and the sets that
    ``orders`` pass through.
    """
    whole = frozenset(players)
    found = {frozenset[str](), whole}
    found |= {frozenset({each}) for each in players} | {whole - {each} for each in players}
    for order in orders:
        found |= {frozenset(order[:end]) for end in range(len(order))}
    place = {name: number for number, name in enumerate(players)}
    return sorted(found, key=lambda each: (len(each), sorted(place[name] for name in each)))


def exact(players: Sequence[str], quality: Qualities) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: its value} from the qualities of all sets S: the sum over the sets without
    the player of |S|! (K − |S| − 1)! / K! · (v(S with it) − v(S)).
    """
    count = len(players)
    weight = [1 / (count * math.comb(count - 1, size)) for size in range(count)]
    found = {}
    for player in players:
        without = [each for each in all_sets(players) if player not in each]
        found[player] = sum(
            (weight[len(each)] * (quality[each | {player}] - quality[each]) for each in without),
            start=np.zeros_like(quality[frozenset()]),
        )
    return found


def of_orders(
    orders: Sequence[Sequence[str]], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: what it adds in each order, [orders, …]}; the mean over the orders is the
    estimate of its value (Castro, Gómez and Tejada 2009).
    """
    found: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in orders[0]}
    for order in orders:
        for end, name in enumerate(order):
            before = frozenset(order[:end])
            found[name].append(quality[before | {name}] - quality[before])
    return {name: np.stack(each) for name, each in found.items()}
