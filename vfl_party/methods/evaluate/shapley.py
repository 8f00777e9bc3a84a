"""Shapley values of parties (Shapley 1953), from the qualities of sets of parties.

A party's value is the mean gain in quality when the party joins the parties before it, over all
orders of the parties. A quality is a number, or an array with the quality on the original rows and
on each bootstrap sample. The samples give the standard error of a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Players = frozenset[str]
Qualities = Mapping[Players, npt.NDArray[np.float64]]
# The maximum number of parties for which all sets (64) are measured.
MAX_EXACT = 6


def list_all_sets(players: Sequence[str]) -> list[Players]:
    """Returns all 2^K sets of players, the smallest first."""
    sizes = range(len(players) + 1)
    return [
        frozenset(members) for size in sizes for members in itertools.combinations(players, size)
    ]


def list_some_sets(players: Sequence[str], orders: Iterable[Sequence[str]]) -> list[Players]:
    """Returns some sets of players, the smallest first: the empty set, each single player, all
    players except one, all players, and the first players of each of ``orders``.
    """
    everyone = frozenset(players)
    sets = {frozenset[str](), everyone}
    sets |= {frozenset({player}) for player in players} | {
        everyone - {player} for player in players
    }
    for order in orders:
        sets |= {frozenset(order[:end]) for end in range(len(order))}
    place = {name: number for number, name in enumerate(players)}
    return sorted(sets, key=lambda members: (len(members), sorted(place[name] for name in members)))


def compute_exact_values(
    players: Sequence[str], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: its Shapley value [...]} from the quality v of all sets. The value is the
    sum of |S|! (K − |S| − 1)! / K! · (v(S with the player) − v(S)) over the sets S without the
    player.
    """
    count = len(players)
    weight = [1 / (count * math.comb(count - 1, size)) for size in range(count)]
    values = {}
    for player in players:
        without = [members for members in list_all_sets(players) if player not in members]
        values[player] = sum(
            (
                weight[len(members)] * (quality[members | {player}] - quality[members])
                for members in without
            ),
            start=np.zeros_like(quality[frozenset()]),
        )
    return values


def compute_additions(
    orders: Sequence[Sequence[str]], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: the quality that it adds in each order, [orders, …]}. The mean over the
    orders estimates the player's value (Castro, Gómez and Tejada 2009).
    """
    additions: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in orders[0]}
    for order in orders:
        for end, name in enumerate(order):
            before = frozenset(order[:end])
            additions[name].append(quality[before | {name}] - quality[before])
    return {name: np.stack(values) for name, values in additions.items()}
