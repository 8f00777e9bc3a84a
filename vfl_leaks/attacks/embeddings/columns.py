"""Feature reconstruction by an active party: a decoder from embeddings to the sender's columns,
trained on rows of which the active party knows the embeddings and the columns.

The attacker knows a tenth of the rows of an exchange (50 to 2,000 rows). It reads each exchange
separately. The baselines are the same decoder on shuffled embeddings (chance), and on only the
attacker's own columns, which may correlate with the sender's columns. The first figure uses only
the embeddings of the last recorded epoch. The second figure combines all data of the attacker: its
own columns, the label, and the concatenated embeddings of all epochs, in which independent noise
averages out (MID, ``gaussian``, ``clipped_gaussian``). For each column, cross-validation chooses
among linear and Gaussian kernel ridge regressions and trees (``vfl_leaks.learn.regression``).
Numbers are judged by R², categories by accuracy. The attack ``images`` reconstructs columns that
are pixels, because a single pixel reveals little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vfl_common.text import list_names
from vfl_leaks.learn.fitting import decode_table, is_mean, r2_by_column
from vfl_leaks.learn.regression import predict
from vfl_leaks.scene.pairs import Pairs, find_senders, list_small_exchanges, yield_pairs
from vfl_leaks.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl_party.base.seeds import derive_seed

# Maximum number of columns that get a figure each. With more columns, only the mean and the best
# column get a figure.
_MAX_COLUMNS = 30
FOUND, CHANCE, _OWN, _FREQUENT = "found", "chance", "own columns", "most frequent"


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each numeric column, the accuracy of each categorical column, the means, and
    the best column.

    R² of 0 is as good as the column's mean. Constant columns are left out. Raises UnfitError if
    there are not enough rows or columns, or if all columns are pixels.
    """
    return decode_columns(scene, "embeddings")


def decode_columns(scene: Scene, what: str) -> list[Figure]:
    """Plays the attack: see ``play``. ``what``: the name of the embeddings in texts."""
    all_figures = []
    for pair in yield_pairs(scene, images=False, what=what):
        guesses = _decode_inputs(pair, scene.seed)
        template = Figure("", f"{len(pair.z_known)} rows", "R²", 0.0, place=pair.place)
        source_names = {
            FOUND: f"{what} of {pair.place}",
            CHANCE: f"shuffled {what} (chance)",
            _OWN: _OWN,
        }
        unlearned = [source_names[source] for source, guess in guesses.items() if is_mean(guess)]
        notes = [_describe_unlearned(unlearned)] if unlearned else []
        numbers, categories = _score_numbers(pair, guesses), _score_categories(pair, guesses)
        constant = (
            len(pair.names) - sum(len(pair.groups[name]) for name in pair.groups) + len(pair.groups)
        )
        constant -= len(numbers) + len(categories)
        word = "column" if constant == 1 else "columns"
        notes += [f"left out: {constant} constant {word}"] if constant else []
        figures = [*yield_column_figures(pair.sender, "column", numbers, template)]
        figures += yield_column_figures(
            pair.sender, "category", categories, replace(template, unit="accuracy")
        )
        figures += _yield_combined(pair, guesses[CHANCE], template, scene.seed)
        if figures and notes:
            figures[0] = replace(figures[0], note=f"{pair.sender}: {'; '.join(notes)}")
        all_figures += figures
    if not all_figures:
        raise UnfitError("all columns are constant")
    small_exchanges, pixels = (
        list_small_exchanges(scene, images=False),
        find_senders(scene, images=True),
    )
    notes = (
        [f"not played on exchanges of too few rows: {list_names(small_exchanges)}"]
        if small_exchanges
        else []
    )
    notes += [f"the attack images reads the pixels of {list_names(pixels)}"] if pixels else []
    if notes:
        all_figures[-1] = replace(all_figures[-1], note="; ".join(notes))
    return all_figures


def _describe_unlearned(sources: list[str]) -> str:
    return (
        f"from {' and from '.join(sources)} the decoder learned nothing, and returns the mean of "
        f"the known rows{', so these figures are equal' if len(sources) > 1 else ''}"
    )


def _decode_inputs(pair: Pairs, seed: int) -> dict[str, Tensor]:
    """Returns {name of the decoded input: the predicted values of the judged rows, [N, F]}."""
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


def _yield_combined(pair: Pairs, chance: Tensor, template: Figure, seed: int) -> Iterator[Figure]:
    """Yields the mean figures of an attacker that combines a row's embeddings of all recorded
    epochs, its own columns of the row, and the row's label.
    """
    z = pair.stacked or (pair.z_known, pair.z_judged)
    inputs = [tensors for tensors in (pair.own, pair.labels) if tensors is not None]
    without_z = tuple(torch.cat(tensors, 1) for tensors in zip(*inputs, strict=True))
    joined = torch.cat([z[0], without_z[0]], 1), torch.cat([z[1], without_z[1]], 1)
    guesses = {
        FOUND: predict([joined], pair.values_known, seed),
        CHANCE: chance,
        _OWN: predict([(without_z[0], without_z[1])], pair.values_known, seed),
    }
    own_columns = "" if pair.own is None else ", own columns"
    template = replace(template, knows=f"{template.knows}{own_columns}, {ALL_EPOCHS}")
    yield from yield_column_figures(
        pair.sender, "column", _score_numbers(pair, guesses), template, only_mean=True
    )
    categories = _score_categories(pair, guesses)
    yield from yield_column_figures(
        pair.sender, "category", categories, replace(template, unit="accuracy"), only_mean=True
    )


def _score_numbers(pair: Pairs, guesses: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns {column: {name of the decoded input: R²}} for the numeric columns that are not
    constant.
    """
    in_groups = {place for group in pair.groups.values() for place in group}
    spread_F = pair.values_judged.double().var(dim=0, correction=0)
    r2 = {what: r2_by_column(guess, pair.values_judged) for what, guess in guesses.items()}
    return {
        name: {what: values[place] for what, values in r2.items()}
        for place, name in enumerate(pair.names)
        if place not in in_groups and spread_F[place] > 0
    }


def _score_categories(pair: Pairs, guesses: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns {column: {name of the decoded input: accuracy}} for the categorical columns that are
    not constant.

    Rows with a category that training did not have are not judged. A baseline is the most frequent
    category of the known rows.
    """
    accuracies = {}
    for name, group in pair.groups.items():
        columns = slice(group.start, group.stop)
        is_judged = pair.values_judged[:, columns].sum(dim=1) > 0
        truth = pair.values_judged[is_judged, columns].argmax(dim=1)
        if not (truth != truth[:1]).any():
            continue

        def accuracy(guess_N: Tensor, truth: Tensor = truth) -> float:
            return float((guess_N == truth).double().mean())

        accuracies[name] = {
            what: accuracy(guess[is_judged, columns].argmax(dim=1))
            for what, guess in guesses.items()
        }
        accuracies[name][_FREQUENT] = accuracy(pair.values_known[:, columns].sum(dim=0).argmax())
    return accuracies


def yield_column_figures(
    sender: str,
    word: str,
    columns: Mapping[str, Mapping[str, float]],
    template: Figure,
    *,
    only_mean: bool = False,
) -> Iterator[Figure]:
    """Yields the figures of columns: the mean, the best column, and each column."""
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
            template,
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
        for name, values in columns.items():
            yield figure(name, values.__getitem__, detail=True)


ATTACK = Attack("columns from embeddings", "active", play, "embeddings")
