"""Attacks of an active party with a decoder from embeddings to the sender's columns: feature
reconstruction, and re-identification of rows. The decoder is trained on rows of which the active
party knows the embeddings and the columns.

The attacker knows a tenth of the rows of an exchange (50 to 2,000 rows). It reads each exchange
separately. The baselines are the same decoder on shuffled embeddings (chance), and on only the
attacker's own columns, which may correlate with the sender's columns. The first figure uses only
the embeddings of the last recorded epoch. The second figure combines all data of the attacker: its
own columns, the label, and the concatenated embeddings of all epochs, in which independent noise
averages out (MID, ``gaussian``, ``clipped_gaussian``). For each column, cross-validation chooses
among linear and Gaussian kernel ridge regressions and trees (``predict``).
Numbers are judged by R², categories by accuracy. The attack ``images`` reconstructs columns that
are pixels, because a single pixel reveals little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vfl_common.text import list_names
from vfl_leaks.fitting import count_held_out, decode_table, is_mean, predict, r2_by_column
from vfl_leaks.pairs import Pairs, find_senders, list_small_exchanges, yield_pairs
from vfl_leaks.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl_party.base.seeds import derive_seed

# Maximum number of columns that get a figure each. With more columns, only the mean and the best
# column get a figure.
_MAX_COLUMNS = 30
FOUND, CHANCE, _OWN, _FREQUENT = "found", "chance", "own columns", "most frequent"


def play_columns(scene: Scene) -> list[Figure]:
    """Returns R² of each numeric column, the accuracy of each categorical column, the means, and
    the best column.

    R² of 0 is as good as the column's mean. Constant columns are left out. Raises UnfitError if
    there are not enough rows or columns, or if all columns are pixels.
    """
    return decode_columns(scene, "embeddings")


def decode_columns(scene: Scene, what: str) -> list[Figure]:
    """Plays the attack: see ``play_columns``. ``what``: the name of the embeddings in texts."""
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
    z_known, z_judged = pair.stacked or (pair.z_known, pair.z_judged)
    others = [inputs for inputs in (pair.own, pair.labels) if inputs is not None]
    other_known = torch.cat([known for known, _ in others], 1)
    other_judged = torch.cat([judged for _, judged in others], 1)
    everything = torch.cat([z_known, other_known], 1), torch.cat([z_judged, other_judged], 1)
    guesses = {
        FOUND: predict([everything], pair.values_known, seed),
        CHANCE: chance,
        _OWN: predict([(other_known, other_judged)], pair.values_known, seed),
    }
    own_columns = "" if pair.own is None else ", own columns"
    number = replace(template, knows=f"{template.knows}{own_columns}, {ALL_EPOCHS}")
    category = replace(number, unit="accuracy")
    for word, scores, figure in (
        ("column", _score_numbers(pair, guesses), number),
        ("category", _score_categories(pair, guesses), category),
    ):
        yield from yield_column_figures(pair.sender, word, scores, figure, only_mean=True)


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


COLUMNS = Attack("columns from embeddings", "active", play_columns, "embeddings")


CANDIDATES = 500


# Re-identification: finds which person of a table an embedding belongs to.
#
# The active party has a table with the sender's columns of 500 people, from another source. A
# decoder reconstructs the columns of each embedding, and the person with the nearest columns is
# chosen. The first figure uses the embeddings of the last recorded epoch, the second the embeddings
# of all epochs.
def play_reidentify(scene: Scene) -> list[Figure]:
    """Returns the share of rows whose nearest candidate is correct. Chance is a random candidate.

    Raises UnfitError if there are not enough rows or columns.
    """
    figures = []
    for pair in yield_pairs(scene):
        candidates = min(CANDIDATES, len(pair.z_judged))
        # Constant columns do not distinguish rows.
        varies_F = pair.values_known.std(dim=0) > 0
        if not varies_F.any():
            continue

        def share(
            known_KD: Tensor, judged_ND: Tensor, pair: Pairs = pair, varies_F: Tensor = varies_F
        ) -> float:
            inputs = torch.cat([known_KD[: count_held_out(len(known_KD))], judged_ND])
            guess_NF = decode_table(
                known_KD, pair.values_known, inputs, scene.seed, pair.groups.values()
            )
            return _match_candidates(pair, varies_F, guess_NF)

        baselines = (
            {"own columns": share(pair.own[0], pair.own[1][:candidates])}
            if pair.own is not None
            else {}
        )
        knows = f"{len(pair.z_known)} rows, {candidates} candidates"
        value = share(pair.z_known, pair.z_judged[:candidates])
        figure = Figure(
            f"rows of {pair.sender}",
            knows,
            "accuracy",
            value,
            chance=1 / candidates,
            baselines=baselines,
            place=pair.place,
        )
        figures.append(figure)
        if pair.over:
            value = _match_candidates(
                pair, varies_F, decode_all_epochs(pair, scene.seed, candidates)
            )
            figures.append(replace(figure, knows=f"{knows}, {ALL_EPOCHS}", value=value))
    if not figures:
        raise UnfitError("all columns are constant")
    return figures


def _match_candidates(pair: Pairs, varies_F: Tensor, guess_NF: Tensor) -> float:
    """Returns the share of decoded rows whose nearest candidate is the same person.

    ``guess_NF``: the decoded columns of the held-out known rows, then of the judged rows. The
    distance in a column is divided by the decoder's error on the held-out rows, so badly decoded
    columns count little. Columns with the same decoded value for all rows are left out.
    """
    held_out = count_held_out(len(pair.z_known))
    held_out_HF, guess_NF = guess_NF[:held_out], guess_NF[held_out:]
    is_used_F = varies_F & (guess_NF != guess_NF[:1]).any(dim=0)
    if not is_used_F.any():
        # The decoder has learned nothing, so a candidate is chosen at random.
        return 1 / len(guess_NF)
    error_F = (held_out_HF - pair.values_known[:held_out])[:, is_used_F].pow(2).mean(dim=0).sqrt()
    scale_F = error_F.clamp_min(1e-3 * pair.values_known[:, is_used_F].std(dim=0))
    distance_NN = torch.cdist(
        guess_NF[:, is_used_F] / scale_F, pair.values_judged[: len(guess_NF), is_used_F] / scale_F
    )
    return float((distance_NN.argmin(dim=1) == torch.arange(len(guess_NF))).double().mean())


REIDENTIFY = Attack(
    "which row of a table an embedding is of", "active", play_reidentify, "embeddings"
)


def decode_all_epochs(pairs: Pairs, seed: int, max_rows: int | None = None) -> Tensor:
    """Returns the decoded values of H held-out known rows and of N judged rows, [H + N, F].

    The function tries the last embedding of each row, and several combinations of its embeddings
    of all epochs (``Pairs.over``). It uses the inputs with the smallest error on the held-out rows.
    Independent noise averages out over epochs, and encoders of different epochs show different
    aspects of a row.

    Args:
        pairs: the known and the judged rows.
        seed: the seed of the decoder.
        max_rows: the maximum number of judged rows; None: no maximum.
    """
    held_out = count_held_out(len(pairs.z_known))
    spread_F = pairs.values_known.std(dim=0).clamp_min(1e-6)
    min_error, best = math.inf, torch.empty(0)
    for known, judged in ((pairs.z_known, pairs.z_judged), *pairs.over.values()):
        inputs = torch.cat([known[:held_out], judged[:max_rows]])
        values = decode_table(known, pairs.values_known, inputs, seed, pairs.groups.values())
        error = (
            ((values[:held_out] - pairs.values_known[:held_out]) / spread_F).pow(2).mean().item()
        )
        if error < min_error or not len(best):
            min_error, best = error, values
    return best
