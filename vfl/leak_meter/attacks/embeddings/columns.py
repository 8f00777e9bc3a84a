"""Feature reconstruction: a decoder from embeddings to the sender's columns, trained on rows of
which the active party knows both.

The attacker knows a tenth of the rows of an exchange, 50 to 2,000, and reads each exchange
separately. The baselines are the same decoder on only the attacker's own columns, which correlate
with the others' without any message, and on shuffled embeddings (chance). The first figure uses
only the embeddings of the last recorded epoch. The second one combines all that the attacker has:
the concatenated embeddings of all epochs, in which independent noise averages out (MID,
``gaussian``, ``clipped_gaussian``), its own columns and the label; for each column,
cross-validation chooses among linear and Gaussian kernel ridges and trees
(``vfl.leak_meter.learn.regression``). Numbers are judged by R², categories by accuracy. Pixels are
left to ``images``, because a single pixel says little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vfl.leak_meter.learn.fitting import decode_table, is_mean, r2_by_column
from vfl.leak_meter.learn.regression import predict
from vfl.leak_meter.scene.pairs import Pairs, exchanges_left_out, pairs, senders_of
from vfl.leak_meter.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl_common.text import list_names
from vfl_party.base.seeds import derive_seed

# Maximum number of columns with a figure each; with more, only mean and best are given.
_MAX_COLUMNS = 30
FOUND, CHANCE, _OWN, _FREQUENT = "found", "chance", "own columns", "most frequent"


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each numeric column, accuracy of each categorical one, means, and the best
    column.

    R² of 0 is as good as the column's mean. Constant columns are left out. Raises UnfitError
    without enough rows or columns, or if all columns are pixels.
    """
    return decode_columns(scene, "embeddings")


def decode_columns(scene: Scene, what: str) -> list[Figure]:
    """Plays the attack as ``play`` does; ``what``: the name of the embeddings in texts."""
    all_figures = []
    for pair in pairs(scene, images=False, what=what):
        guesses = _guesses(pair, scene.seed)
        like = Figure("", f"{len(pair.z_known)} rows", "R²", 0.0, place=pair.place)
        words = {FOUND: f"{what} of {pair.place}", CHANCE: f"shuffled {what} (chance)", _OWN: _OWN}
        nothing = [words[source] for source, guess in guesses.items() if is_mean(guess)]
        notes = [_nothing(nothing)] if nothing else []
        numbers, categories = _numbers(pair, guesses), _categories(pair, guesses)
        constant = (
            len(pair.names) - sum(len(pair.groups[name]) for name in pair.groups) + len(pair.groups)
        )
        constant -= len(numbers) + len(categories)
        word = "column" if constant == 1 else "columns"
        notes += [f"left out: {constant} constant {word}"] if constant else []
        figures = [*figures_of(pair.sender, "column", numbers, like)]
        figures += figures_of(pair.sender, "category", categories, replace(like, unit="accuracy"))
        figures += _combine(pair, guesses[CHANCE], like, scene.seed)
        if figures and notes:
            figures[0] = replace(figures[0], note=f"{pair.sender}: {'; '.join(notes)}")
        all_figures += figures
    if not all_figures:
        raise UnfitError("all columns are constant")
    few, pixels = exchanges_left_out(scene, images=False), senders_of(scene, images=True)
    notes = [f"not played on exchanges of too few rows: {list_names(few)}"] if few else []
    notes += (
        [f"pixels are left to the attack images: those of {list_names(pixels)}"] if pixels else []
    )
    if notes:
        all_figures[-1] = replace(all_figures[-1], note="; ".join(notes))
    return all_figures


def _nothing(of: list[str]) -> str:
    return (
        f"from {' and from '.join(of)} the decoder learned nothing, and returns the mean of the "
        f"known rows{', so these figures are equal' if len(of) > 1 else ''}"
    )


def _guesses(pair: Pairs, seed: int) -> dict[str, Tensor]:
    """Returns {what is decoded: the values [N, F] that it gives for the judged rows}."""
    drawn = torch.Generator().manual_seed(derive_seed(seed, "shuffled embeddings") % 2**63)
    shuffled = pair.z_known[torch.randperm(len(pair.z_known), generator=drawn)]
    groups = [*pair.groups.values()]
    guesses = {
        FOUND: decode_table(pair.z_known, pair.values_known, pair.z_judged, seed, groups),
        CHANCE: decode_table(shuffled, pair.values_known, pair.z_judged, seed, groups),
    }
    if pair.own is not None:
        guesses[_OWN] = decode_table(pair.own[0], pair.values_known, pair.own[1], seed, groups)
    return guesses


def _combine(pair: Pairs, chance: Tensor, like: Figure, seed: int) -> Iterator[Figure]:
    """Yields the means for an attacker that combines a row's embeddings of all recorded epochs, its
    own columns of the row, and the row's label.
    """
    z = pair.stacked or (pair.z_known, pair.z_judged)
    own = [of for of in (pair.own, pair.labels) if of is not None]
    alone = torch.cat([of[0] for of in own], 1), torch.cat([of[1] for of in own], 1)
    joined = torch.cat([z[0], alone[0]], 1), torch.cat([z[1], alone[1]], 1)
    guesses = {
        FOUND: predict([joined], pair.values_known, seed),
        CHANCE: chance,
        _OWN: predict([alone], pair.values_known, seed),
    }
    more = "" if pair.own is None else ", own columns"
    like = replace(like, knows=f"{like.knows}{more}, {ALL_EPOCHS}")
    yield from figures_of(pair.sender, "column", _numbers(pair, guesses), like, only_mean=True)
    categories = _categories(pair, guesses)
    yield from figures_of(
        pair.sender, "category", categories, replace(like, unit="accuracy"), only_mean=True
    )


def _numbers(pair: Pairs, guesses: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns {column: {what is decoded: its R²}} of the numeric columns that are not constant."""
    in_groups = {place for group in pair.groups.values() for place in group}
    spread_F = pair.values_judged.double().var(dim=0, correction=0)
    r2 = {what: r2_by_column(guess, pair.values_judged) for what, guess in guesses.items()}
    return {
        name: {what: values[place] for what, values in r2.items()}
        for place, name in enumerate(pair.names)
        if place not in in_groups and spread_F[place] > 0
    }


def _categories(pair: Pairs, guesses: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns {column: {what is decoded: its accuracy}} of the categorical columns that are not
    constant.

    Rows with a new category are not judged. A baseline is the most frequent value of the known
    rows.
    """
    accuracies = {}
    for name, group in pair.groups.items():
        part = slice(group.start, group.stop)
        judged = pair.values_judged[:, part].sum(dim=1) > 0
        truth = pair.values_judged[judged, part].argmax(dim=1)
        if not (truth != truth[:1]).any():
            continue

        def share(guess_N: Tensor, truth: Tensor = truth) -> float:
            return float((guess_N == truth).double().mean())

        accuracies[name] = {
            what: share(guess[judged, part].argmax(dim=1)) for what, guess in guesses.items()
        }
        accuracies[name][_FREQUENT] = share(pair.values_known[:, part].sum(dim=0).argmax())
    return accuracies


def figures_of(
    sender: str,
    word: str,
    columns: Mapping[str, Mapping[str, float]],
    like: Figure,
    *,
    only_mean: bool = False,
) -> Iterator[Figure]:
    """Yields the figures of columns: their mean, the best one, and each of them."""
    if not columns:
        return

    def figure(of: str, value: Callable[[str], float], *, detail: bool = False) -> Figure:
        baselines = {
            what: value(what)
            for what in next(iter(columns.values()))
            if what not in (FOUND, CHANCE)
        }
        chance = value(CHANCE)
        return replace(
            like,
            of=f"{sender}: {of}",
            value=value(FOUND),
            chance=chance,
            baselines=baselines,
            detail=detail,
        )

    many = "columns" if word == "column" else "categories"
    yield figure(
        f"mean of {many}",
        lambda what: statistics.fmean(values[what] for values in columns.values()),
    )
    if only_mean:
        return
    best = max(columns.values(), key=lambda values: values[FOUND])
    yield figure(f"best-read {word}", lambda what: best[what], detail=True)
    if len(columns) <= _MAX_COLUMNS:
        for name, own in columns.items():
            yield figure(name, own.__getitem__, detail=True)


ATTACK = Attack("columns from embeddings", "active", play, "embeddings")
