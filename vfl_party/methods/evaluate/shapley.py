"""Shapley values of parties (Shapley 1953), from the qualities of sets of parties.

A party's value is the mean, over all orders of the parties, of what it adds to the quality of the
parties before it. A quality is a number, or an array: for the original rows and for each bootstrap
sample, from which the values get an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Players = frozenset[str]
Qualities = Mapping[Players, npt.NDArray[np.float64]]
# The largest number of parties for which all sets (64) are measured.
MAX_EXACT = 6


def all_sets(players: Sequence[str]) -> list[Players]:
    """Returns all 2^K sets of players, small ones first."""
    sizes = range(len(players) + 1)
    return [
        frozenset(members) for size in sizes for members in itertools.combinations(players, size)
    ]


def some_sets(players: Sequence[str], orders: Iterable[Sequence[str]]) -> list[Players]:
    """Returns, small ones first: the empty set, each single player, all but one, all players, and
    the sets that ``orders`` pass through.
    """
    whole = frozenset(players)
    sets = {frozenset[str](), whole}
    sets |= {frozenset({player}) for player in players} | {whole - {player} for player in players}
    for order in orders:
        sets |= {frozenset(order[:end]) for end in range(len(order))}
    place = {name: number for number, name in enumerate(players)}
    return sorted(sets, key=lambda members: (len(members), sorted(place[name] for name in members)))


def exact_values(players: Sequence[str], quality: Qualities) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: its value [...]} from the qualities of all sets S: the sum over the sets
    without the player of |S|! (K − |S| − 1)! / K! · (v(S with it) − v(S)).
    """
    count = len(players)
    weight = [1 / (count * math.comb(count - 1, size)) for size in range(count)]
    values = {}
    for player in players:
        without = [members for members in all_sets(players) if player not in members]
        values[player] = sum(
            (
                weight[len(members)] * (quality[members | {player}] - quality[members])
                for members in without
            ),
            start=np.zeros_like(quality[frozenset()]),
        )
    return values


def additions_by_order(
    orders: Sequence[Sequence[str]], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: what it adds in each order, [orders, …]}; the mean over the orders is the
    estimate of its value (Castro, Gómez and Tejada 2009).
    """
    added: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in orders[0]}
    for order in orders:
        for end, name in enumerate(order):
            before = frozenset(order[:end])
            added[name].append(quality[before | {name}] - quality[before])
    return {name: np.stack(values) for name, values in added.items()}
