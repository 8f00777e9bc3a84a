"""Names the rows of a fuzzy linkage from their encodings, by their similarities.

The attacker is the server, which has the encodings and not their key. It has a list of people with
the same fields, and encodes it with a key of its own. The key does not change how similar two rows
are, so equal people have similar rows of similarities (a graph matching attack; Vidanage,
Christen, Ranbaduge and Schnell 2020). Matches are improved step by step, the most certain ones
first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from vfl_common.linkage import Encodings, compare
from vfl_leaks.scene import Attack, Figure, Scene, UnfitError
from vfl_party.base.seeds import derive_seed

Matrix = npt.NDArray[np.float64]
_STEPS, _GROWTH, _FIRST = 25, 1.5, 5
# The quantiles of a row's similarities by which rows are first compared, and the weight of the
# number of bits beside them.
_QUANTILES, _BITS_WEIGHT = 1.0 - np.geomspace(0.002, 0.5, 40), 5.0
# The maximum number of rows that the leak meter names, the minimum, and the keys that it tries.
_MAX_ROWS, _MIN_ROWS, _KEYS = 500, 20, 3


class Guesses(NamedTuple):
    """The position in the list for each row, int64 [N], or -1; and how well the guesses fit."""

    people: npt.NDArray[np.int64]
    score: float


def identify_rows(encodings_NB: Encodings, list_MB: Encodings, known: Mapping[int, int]) -> Guesses:
    """Guesses which person of a list each encoded row is.

    Args:
        encodings_NB: The encodings, uint8 [N, bytes].
        list_MB: The encodings of the attacker's list with any key, uint8 [M, bytes].
        known: {row: its person in the list} that the attacker knows already; may be empty.

    An attacker repeats this with several keys of its own and takes the guesses with the highest
    score.
    """
    first, second = _get_similarities(encodings_NB), _get_similarities(list_MB)
    matches = np.full(len(first), -1, np.int64)
    if known:
        matches[[*known]] = [*known.values()]
    else:
        own, other = (
            _describe(similarities, encodings)
            for similarities, encodings in ((first, encodings_NB), (second, list_MB))
        )
        distances = ((own[:, None] - other[None]) ** 2).sum(2)
        matches = _assign(-distances)
    certain = len(known) if known else len(first)
    guesses, score = matches, 0.0
    for _ in range(_STEPS):
        used = np.flatnonzero(matches >= 0)
        scores = (
            _standardize(first[:, used].T).T @ _standardize(second[:, matches[used]].T) / len(used)
        )
        guesses = _assign(scores)
        rows = np.flatnonzero(guesses >= 0)
        best = np.full(len(first), -np.inf)
        best[rows] = scores[rows, guesses[rows]]
        score = float(best[rows].mean())
        # A match is more certain if the second best person is much less similar.
        margin = best - np.partition(scores, -2, axis=1)[:, -2]
        certain = min(len(rows), int(certain * _GROWTH) + _FIRST)
        chosen = np.argsort(-(best + margin))[:certain]
        matches = np.full(len(first), -1, np.int64)
        matches[chosen] = guesses[chosen]
        if known:
            matches[[*known]] = [*known.values()]
    return Guesses(guesses, score)


def _get_similarities(encodings: Encodings) -> Matrix:
    bits = np.unpackbits(encodings, axis=1).astype(np.float32)
    similarities = compare(bits, bits).astype(np.float64)
    np.fill_diagonal(similarities, 0.0)
    return similarities


def _describe(similarities: Matrix, encodings: Encodings) -> Matrix:
    """Returns facts of rows that do not depend on the key, standardized, [N, facts]."""
    bits = np.unpackbits(encodings, axis=1).sum(1, dtype=np.float64)
    quantiles = np.quantile(similarities, _QUANTILES, axis=1).T
    return np.hstack([_BITS_WEIGHT * _standardize(bits[:, None]), _standardize(quantiles)])


def _standardize(values: Matrix) -> Matrix:
    result: Matrix = (values - values.mean(0)) / (values.std(0) + 1e-9)
    return result


def _assign(scores: Matrix) -> npt.NDArray[np.int64]:
    """Returns the column of each row with the highest total score, each column at most once."""
    rows, columns = linear_sum_assignment(scores, maximize=True)
    result = np.full(len(scores), -1, np.int64)
    result[rows] = columns
    return result


def play_encodings(scene: Scene) -> Sequence[Figure]:
    """Names the rows of each party, whose names and dates are the attacker's list."""
    if not scene.encode_rows:
        raise UnfitError("no rows are linked by encodings")
    return [figure for party in scene.encode_rows for figure in _name_rows(scene, party)]


def _name_rows(scene: Scene, party: str) -> Iterator[Figure]:
    encode, seed = scene.encode_rows[party], derive_seed(scene.seed, party)
    own = encode(_make_key(seed, 0))
    draw = np.random.default_rng(seed)
    sample = draw.permutation(len(own))[:_MAX_ROWS]
    if len(sample) < _MIN_ROWS:
        raise UnfitError(f"{party} has fewer than {_MIN_ROWS} rows")
    place = draw.permutation(len(sample))
    for known in (0, len(sample) // 10):
        knows = {row: int(place[row]) for row in range(known)}
        tries = (
            identify_rows(
                own[sample], encode(_make_key(seed, key))[sample[np.argsort(place)]], knows
            )
            for key in range(1, 2 if known else 1 + _KEYS)
        )
        people = max(tries, key=lambda guesses: guesses.score).people
        listed = f"a list of {len(sample):,} people, who are these rows"
        yield Figure(
            of=f"rows of {party}",
            knows=f"{listed}, and {known} of them" if known else listed,
            unit="accuracy",
            value=float(np.mean(people[known:] == place[known:])),
            chance=1.0 / len(sample),
            place="align/encodings",
        )


def _make_key(seed: int, number: int) -> bytes:
    return hashlib.sha256(f"{seed} {number}".encode()).digest()


ENCODINGS = Attack(
    "who a row of a fuzzy linkage is, from its encoding", "server", play_encodings, "encodings"
)
