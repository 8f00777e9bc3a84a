"""Label inference from all gradients of a row, instead of the gradients of one batch. Independent
noise averages out over epochs.

A row has one gradient per round. The attacker needs no model and no label. There are three attacks.
The last two defeat specific defences, and are stronger with known labels:

*Sum* (two classes): the sum of a row's positions along the main direction of each round's
gradients. The direction is the first singular vector of the gradients scaled to length one, with
the sign that agrees with earlier rounds. The attack defeats ``iso``.

*Mixture by batch* (two classes): defeats Marvell (arXiv 2102.08504), whose noise depends on the
batch. The noise is largest along the axis between the classes. Orthogonal to the axis, one class
may get no noise. The first singular vector of a batch is that axis. A row has three features: its
position along the axis, the logarithm of the length of its orthogonal part, and the cosine of the
orthogonal part with that of the previous round. In each batch, one Gaussian models the rows of a
class. Expectation maximisation combines all batches of a row.

*Mixture of means* (any number of classes): defeats ``max_norm``, ``iso`` and noise on each
message's labels. The gradients of a row are scaled to length one and averaged over each quarter of
the training. A mixture of Gaussians models these means.

With known labels, the classes of the known rows are fixed. The search begins with a regression from
the means and the attacker's own columns to the classes. *Regression* is this regression alone, and
*own columns* is the regression without any message. A figure is for all training rows, so it also
covers batches of one row or of one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vfl_leaks.attacks.batches import common_direction, normalize_rows
from vfl_leaks.attacks.completion import draw_stratified
from vfl_leaks.fitting import list_alternatives, predict
from vfl_leaks.scene import ALL_EPOCHS, Attack, Figure, Intercepted, Scene, UnfitError
from vfl_leaks.scores import Numbers, Tally
from vfl_party.base.seeds import Rows, derive_seed

# Two numbers of labels that an attacker knows, and the minimum number of rows for each label.
KNOWN, _MANY, TIMES = 50, 200, 4
# The number of parts of the training over which gradients are averaged, and the number of principal
# directions of each mean.
_PARTS, _WIDTH = 4, 8
# Weight of the axes of earlier batches in the running mean.
_DECAY = 0.8

Rounds = Sequence[Sequence[Intercepted]]


def play_epochs(scene: Scene) -> list[Figure]:
    """Scores all rows with at least one gradient. Raises UnfitError if no row can be judged."""
    classes, count = scene.classes, len(scene.labels)
    rounds = split_rounds(scene)
    rows = np.unique(np.concatenate([batch.rows for batches in rounds for batch in batches]))
    of_means = compute_means(rounds, count, _PARTS)
    stacked_ND = torch.cat(
        [compute_means(rounds, count, 1).stack_features(), of_means.stack_features()], 1
    )
    if classes == 2:
        of_batch, by_round_N = compute_batch_features(rounds, count), _sum_by_round(rounds, count)
        views = {"mixture by batch": of_batch, "mixture of means": of_means}
        begins = [
            _make_initial(of_batch.sum_features()[:, 0], rows),
            _make_initial(by_round_N, rows),
        ]
        scores = {
            "sum by round": _stack_scores(by_round_N),
            "sum by batch": _stack_scores(of_batch.sum_features()[:, 0]),
        }
        stacked_ND = torch.cat([of_batch.sum_features(), stacked_ND], 1)
    else:
        views, scores = {"mixture of means": of_means}, dict[str, Tensor]()
        begins = [_make_initial_by_clusters(of_means, rows, classes, scene.seed)]
    for (name, view), begin_NC in zip(views.items(), begins, strict=True):
        scores[name] = infer_classes(view, begin_NC)
    figures = [_judge(scene, f"nothing, {how}", score_NC, rows) for how, score_NC in scores.items()]
    for known in (KNOWN, _MANY):
        if len(rows) >= TIMES * known:
            # With several classes, a regression is better than a mixture with known labels.
            figures += _play_with_labels(
                scene, views if classes == 2 else {}, stacked_ND, rows, known
            )
    return figures


def split_rounds(scene: Scene) -> Rounds:
    """Returns the batches of each round. Raises UnfitError if the attacker received no
    gradients.
    """
    by_round = groupby(scene.gradients(), key=lambda batch: (batch.place, batch.round))
    rounds = [[*batches] for _, batches in by_round]
    if not rounds:
        raise UnfitError("the attacker received no gradients")
    return rounds


def _play_with_labels(
    scene: Scene, views: Mapping[str, Messages], stacked_ND: Tensor, rows: Rows, count: int
) -> Iterator[Figure]:
    """Yields the figures of an attacker that knows ``count`` labels."""
    known = draw_stratified(scene.labels, rows, scene.classes, scene.seed, count)
    judged = np.setdiff1d(rows, known)
    hot_KC = functional.one_hot(scene.labels[known], scene.classes).double()
    inputs, baselines = [(stacked_ND[known], stacked_ND[judged])], dict[str, float]()
    if own := scene.columns.get(scene.attacker):
        own_pair = own.table(known).double(), own.table(judged).double()
        inputs = list_alternatives(inputs[0], own_pair)
        guess_NC = _scatter(predict([own_pair], hot_KC, scene.seed), judged, len(scene.labels))
        baselines["own columns"] = _judge(scene, "own columns", guess_NC, judged).value
    guess_NC = _scatter(predict(inputs, hot_KC, scene.seed), judged, len(scene.labels))
    known_NC = _scatter(hot_KC, known, len(scene.labels))
    begin_NC = torch.softmax(4 * (guess_NC + known_NC), 1)
    scores = {"regression": guess_NC}
    for name, view in views.items():
        scores[name] = infer_classes(view, begin_NC, known_NC)
    for name, score_NC in scores.items():
        figure = _judge(scene, f"{count} labels, {name}", score_NC, judged)
        yield replace(figure, baselines=baselines)


def compute_batch_features(rounds: Rounds, count: int) -> Messages:
    """Returns the features of *mixture by batch* for the messages about ``count`` rows."""
    row, group, features = list[Tensor](), list[Tensor](), list[Tensor]()
    width = rounds[0][0].came.flatten(1).shape[1]
    axis_D = torch.zeros(width, dtype=torch.float64)
    previous_ND = torch.zeros(count, width, dtype=torch.float64)
    for number, batch in enumerate(batch for batches in rounds for batch in batches):
        g_BD, at_B = batch.came.double().flatten(1), torch.from_numpy(batch.rows)
        unit_D = common_direction(g_BD)
        unit_D = -unit_D if unit_D @ axis_D < 0 else unit_D
        axis_D = _DECAY * axis_D + unit_D
        along_B = g_BD @ unit_D
        across_BD = g_BD - along_B[:, None] * unit_D
        length_B = (across_BD.norm(dim=1) + 1e-12 * g_BD.norm(dim=1) + 1e-300).log()
        cosine_B = functional.cosine_similarity(across_BD, previous_ND[at_B], dim=1, eps=1e-300)
        previous_ND[at_B] = across_BD
        position_B = (along_B - along_B.median()) / (along_B.std(correction=0) + 1e-300)
        features.append(
            torch.stack([position_B, _standardize(length_B), _standardize(cosine_B)], 1)
        )
        row.append(at_B)
        group.append(torch.full((len(at_B),), number))
    return Messages(torch.cat(row), torch.cat(group), torch.cat(features), count)


def _standardize(x_B: Tensor) -> Tensor:
    return (x_B - x_B.mean()) / (x_B.std(correction=0) + 1e-9)


def compute_means(rounds: Rounds, count: int, parts: int) -> Messages:
    """Returns the mean of each row's gradients, scaled to length one, over each of ``parts`` parts
    of the training. The means are projected onto the first principal directions of the part.
    """
    row, group, features = list[Tensor](), list[Tensor](), list[Tensor]()
    parts = min(parts, len(rounds))
    for part, numbers in enumerate(np.array_split(np.arange(len(rounds)), parts)):
        batches = [batch for number in numbers for batch in rounds[number]]
        at_M = torch.from_numpy(np.concatenate([batch.rows for batch in batches]))
        unit_MD = torch.cat([normalize_rows(batch.came) for batch in batches])
        sum_ND = unit_MD.new_zeros(count, unit_MD.shape[1]).index_add_(0, at_M, unit_MD)
        counts_N = torch.bincount(at_M, minlength=count)
        rows_R = torch.nonzero(counts_N)[:, 0]
        mean_RD = sum_ND[rows_R] / counts_N[rows_R, None]
        mean_RD = mean_RD - mean_RD.mean(0)
        main_DW = torch.linalg.svd(mean_RD, full_matrices=False).Vh[:_WIDTH].T
        x_RW = mean_RD @ main_DW
        row.append(rows_R)
        group.append(torch.full((len(rows_R),), part))
        features.append(x_RW / x_RW.std(dim=0, correction=0).clamp_min(1e-300))
    return Messages(torch.cat(row), torch.cat(group), torch.cat(features), count)


def _make_initial(score_N: Tensor, rows: Rows) -> Tensor:
    """Returns initial probabilities of two classes, [N, 2], from a score."""
    z_N = (score_N - score_N[rows].mean()) / score_N[rows].std().clamp_min(1e-300)
    return torch.stack([1 - z_N.sigmoid(), z_N.sigmoid()], 1)


def _make_initial_by_clusters(view: Messages, rows: Rows, classes: int, seed: int) -> Tensor:
    """Returns initial probabilities of several classes, [N, C], from clusters of k-means. The order
    of the classes is arbitrary.
    """
    from sklearn.cluster import KMeans

    begin_NC = torch.full((view.rows, classes), 1 / classes, dtype=torch.float64)
    kmeans = KMeans(
        min(classes, len(rows)), n_init=4, random_state=derive_seed(seed, "mixture") % 2**32
    )
    groups = kmeans.fit_predict(view.stack_features()[rows].numpy())
    begin_NC[rows] += functional.one_hot(torch.from_numpy(groups).long(), classes)
    return begin_NC / begin_NC.sum(1, keepdim=True)


def _sum_by_round(rounds: Rounds, count: int) -> Tensor:
    """Returns the sum of each row's positions along the main directions of the rounds, [N]."""
    scores_N = torch.zeros(count, dtype=torch.float64)
    for batches in rounds:
        rows = np.concatenate([batch.rows for batch in batches])
        unit_BD = torch.cat([normalize_rows(batch.came) for batch in batches])
        position_B = unit_BD @ common_direction(unit_BD)
        position_B = -position_B if position_B @ scores_N[rows] < 0 else position_B
        scores_N.index_add_(0, torch.from_numpy(rows), position_B)
    return scores_N


def _stack_scores(score_N: Tensor) -> Tensor:
    return torch.stack([-score_N, score_N], 1)


def _scatter(values_RC: Tensor, rows: Rows, count: int) -> Tensor:
    values_NC = torch.zeros(count, values_RC.shape[1], dtype=torch.float64)
    values_NC[rows] = values_RC.double()
    return values_NC


def _judge(scene: Scene, knows: str, score_NC: Tensor, rows: Rows) -> Figure:
    """Returns one figure for all rows: the AUC for two classes, otherwise the accuracy. Groups that
    were found without labels are assigned to classes in the best way.
    """
    tally, labels_R, unit_ = Tally(scene.seed), scene.labels[rows].numpy(), "accuracy"
    score_RC = score_NC[rows]
    if scene.classes == 2:
        unit_ = "AUC"
        tally.binary((score_RC[:, 1] - score_RC[:, 0]).numpy(), labels_R == 1)
    elif knows.startswith("nothing"):
        tally.groups(score_RC.argmax(1).numpy(), labels_R, scene.classes)
    else:
        tally.named(score_RC.argmax(1).numpy(), labels_R)
    # There is one figure, and no quantile over batches.
    return replace(tally.figure(knows, unit_), high=None, chance_high=None)


EPOCHS = Attack("labels from all gradients that a row has had", "passive", play_epochs, "gradients")


# Infers the class of each row from all messages about it by expectation maximisation.
#
# A row has one message per round. Each message belongs to a *group* with common statistics: a
# batch, if the noise depends on the batch, or a round. In each group, one Gaussian models the rows
# of a class. The posterior of a row is the sum of the log likelihoods of its messages. Independent
# noise therefore averages out, and the direction between classes may change from group to group.

_STEPS, _ENOUGH = 60, 3e-4


# A class's Gaussian is shrunk towards the group's Gaussian, which counts as this many rows.
_MEAN_ROWS, _COVARIANCE_ROWS = 2.0, 4.0


# The limit of one message's log ratio, because a Gaussian is a rough model, and the temperature.
_MAX_LOG_RATIO, _TEMPER = 4.0, 0.7


@dataclass(frozen=True, eq=False)
class Messages:
    """All M messages about N rows that an attacker received.

    ``row``, ``group``: the row and the group of each message, int64 [M]. ``features``: the features
    of each message, float64 [M, F], nearly standardised in each group. ``rows``: the number N.
    """

    row: Tensor
    group: Tensor
    features: Tensor
    rows: int

    def sum_by_group(self, values_MX: Tensor) -> Tensor:
        """Returns the sum of the messages' values for each group, [G, X]."""
        groups = int(self.group.max()) + 1
        return values_MX.new_zeros(groups, values_MX.shape[1]).index_add_(0, self.group, values_MX)

    def sum_by_row(self, values_MX: Tensor) -> Tensor:
        """Returns the sum of the messages' values for each row, [N, X]."""
        return values_MX.new_zeros(self.rows, values_MX.shape[1]).index_add_(0, self.row, values_MX)

    def sum_features(self) -> Tensor:
        """Returns the sum of each row's features over its messages, [N, F]."""
        return self.sum_by_row(self.features)

    def stack_features(self) -> Tensor:
        """Returns the concatenated features of all groups, [N, G * F]; 0 for a group without the
        row.
        """
        groups, width = int(self.group.max()) + 1, self.features.shape[1]
        features = self.features.new_zeros(self.rows, groups, width)
        features[self.row, self.group] = self.features
        return features.flatten(1)


def infer_classes(messages: Messages, begin_NC: Tensor, known_NC: Tensor | None = None) -> Tensor:
    """Returns the log posterior of each row's class, float64 [N, C], up to a constant for each row.

    Args:
        messages: the messages.
        begin_NC: the initial class probabilities.
        known_NC: the one-hot classes of known rows; zeros for a row of unknown class.
    """
    is_known_N1 = None if known_NC is None else known_NC.sum(1, keepdim=True) > 0
    q_NC = _fix_known(begin_NC, known_NC, is_known_N1)
    has_messages_N = torch.zeros(messages.rows, dtype=torch.bool)
    has_messages_N[messages.row] = True
    groups = _ClassGaussians(messages)
    posterior_NC = torch.zeros_like(q_NC)
    for _ in range(_STEPS):
        log_MC = torch.stack([groups.log_density(q_N) for q_N in q_NC.T], dim=1)
        log_MC = (log_MC - log_MC.mean(1, keepdim=True)).clamp(
            -_MAX_LOG_RATIO / 2, _MAX_LOG_RATIO / 2
        )
        prior_C = q_NC[has_messages_N].mean(0).clamp_min(1e-3)
        posterior_NC = messages.sum_by_row(log_MC) + prior_C.log()
        after_NC = _fix_known(torch.softmax(_TEMPER * posterior_NC, 1), known_NC, is_known_N1)
        change = (after_NC - q_NC)[has_messages_N].abs().mean().item()
        q_NC = (q_NC + after_NC) / 2
        if change < _ENOUGH:
            break
    return posterior_NC


def _fix_known(q_NC: Tensor, known_NC: Tensor | None, is_known_N1: Tensor | None) -> Tensor:
    if known_NC is None or is_known_N1 is None:
        return q_NC
    return torch.where(is_known_N1, known_NC, q_NC)


class _ClassGaussians:
    """Models the rows of a class by one Gaussian in each group. Its covariance is shrunk towards
    the covariance of the group.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages, x_MF = messages, messages.features
        count_G1 = messages.sum_by_group(torch.ones(len(x_MF), 1, dtype=x_MF.dtype))
        mean_GF = messages.sum_by_group(x_MF) / count_G1
        group_GFF = self._outer(x_MF - mean_GF[messages.group]) / count_G1[:, :, None]
        self._prior_GFF = _COVARIANCE_ROWS * group_GFF
        self._min_FF = 1e-3 * torch.eye(x_MF.shape[1], dtype=x_MF.dtype)

    def _outer(self, d_MF: Tensor, weight_M1: Tensor | float = 1.0) -> Tensor:
        """Returns the sum of the outer products of the messages' vectors for each group,
        [G, F, F].
        """
        flat = (weight_M1 * d_MF)[:, :, None] * d_MF[:, None, :]
        width = d_MF.shape[1]
        return self._messages.sum_by_group(flat.flatten(1)).reshape(-1, width, width)

    def log_density(self, q_N: Tensor) -> Tensor:
        """Returns the log density of each message under a class, [M], without a constant.

        ``q_N``: the probability that each row belongs to the class.
        """
        messages, weight_M1 = self._messages, q_N[self._messages.row][:, None]
        count_G1 = messages.sum_by_group(weight_M1) + _MEAN_ROWS
        mean_GF = messages.sum_by_group(weight_M1 * messages.features) / count_G1
        d_MF = messages.features - mean_GF[messages.group]
        spread_GFF = self._outer(d_MF, weight_M1) + self._prior_GFF
        spread_GFF = spread_GFF / (count_G1[:, :, None] + _COVARIANCE_ROWS - _MEAN_ROWS)
        spread_GFF = spread_GFF + self._min_FF
        inverse_GFF, logdet_G = torch.linalg.inv(spread_GFF), torch.linalg.slogdet(spread_GFF)[1]
        away_M = torch.einsum("mf,mfh,mh->m", d_MF, inverse_GFF[messages.group], d_MF)
        density_M: Tensor = -0.5 * (away_M + logdet_G[messages.group])
        return density_M


# Label inference in a regression: with the squared error, a row's gradient is proportional to the
# error of the model.
#
# g = 2/B · (f(z) − y) · ∂f/∂z. If the top model is linear, ∂f/∂z is the same direction for all
# rows. A row's position along it is f(z) − y, up to sign and scale. Before training, f(z) is nearly
# the same for all rows, so the positions in the first round reveal y. Later positions reveal the
# error of the model for a row. The attack estimates the direction as the first singular vector of
# all gradients of a round. Isotropic noise (``iso``) can hide the direction in one batch, but not
# in a round. |ρ| is Spearman's rank correlation of positions and labels.
def play_residuals(scene: Scene) -> list[Figure]:
    """Scores all batches, the batches of the first round, and the sum of each row's positions over
    rounds.

    Another figure is for an attacker that knows 50 numbers and trains a regression on all gradients
    of a row. Raises UnfitError if the labels are classes, or if no batch can be judged.
    """
    numbers_N, batches = scene.numbers.numpy(), [*_yield_positions(scene)]
    if not batches:
        raise UnfitError("the attacker received no gradients")
    first_rounds = {
        place: min(batch.round for batch in batches if batch.exchange == place)
        for place in {batch.exchange for batch in batches}
    }
    all_batches, first_batches = Tally(scene.seed), Tally(scene.seed)
    for batch in batches:
        for tally in (
            (all_batches, first_batches)
            if batch.round == first_rounds[batch.exchange]
            else (all_batches,)
        ):
            tally.numbers(batch.positions, numbers_N[batch.rows])
    figures = [all_batches.figure("nothing, by direction", "|ρ|")]
    if len(first_rounds) < len({(batch.exchange, batch.round) for batch in batches}):
        figures.append(first_batches.figure("nothing, first round", "|ρ|"))
        rows = np.unique(np.concatenate([batch.rows for batch in batches]))
        by_row = Tally(scene.seed)
        sums_N = _sum_positions(batches, len(numbers_N))
        by_row.numbers(sums_N[rows], numbers_N[rows])
        figure = by_row.figure(f"nothing, {ALL_EPOCHS}", "|ρ|")
        # There is one figure, so no quantile over batches.
        figures.append(replace(figure, high=None, chance_high=None))
        figures += _play_residuals_with_labels(scene, rows, torch.from_numpy(sums_N))
    return figures


def _play_residuals_with_labels(scene: Scene, rows: Rows, sums_N: Tensor) -> Iterator[Figure]:
    """Yields the figure of an attacker that knows some labels. Its regression uses the sum of a
    row's positions, the means of its gradients over parts of the training, and its own columns.
    """
    if len(rows) < TIMES * KNOWN:
        return
    random = np.random.default_rng(derive_seed(scene.seed, "auxiliary labels"))
    known, judged = np.split(random.permutation(rows), [KNOWN])
    rounds = split_rounds(scene)
    stacks = [compute_means(rounds, len(scene.numbers), parts).stack_features() for parts in (1, 4)]
    features_ND = torch.cat([sums_N[:, None], *stacks], 1)
    inputs = [(features_ND[known], features_ND[judged])]
    numbers_K1, baselines = scene.numbers[known][:, None], dict[str, float]()

    def figure(guess_N1: Tensor) -> Figure:
        tally = Tally(scene.seed)
        tally.numbers(guess_N1[:, 0].numpy(), scene.numbers.numpy()[judged])
        made = tally.figure(f"{KNOWN} labels, {ALL_EPOCHS}", "|ρ|")
        return replace(made, high=None, chance_high=None)

    if own := scene.columns.get(scene.attacker):
        own_pair = own.table(known).double(), own.table(judged).double()
        baselines["own columns"] = figure(predict([own_pair], numbers_K1, scene.seed)).value
        inputs = list_alternatives(inputs[0], own_pair)
    yield replace(figure(predict(inputs, numbers_K1, scene.seed)), baselines=baselines)


@dataclass(frozen=True, eq=False)
class _BatchPositions:
    """The positions of a batch's rows along the main direction of their round. The direction's sign
    agrees with the round before. ``exchange``: the phase and the exchange.
    """

    exchange: str
    round: int
    rows: Rows
    positions: Numbers


def _yield_positions(scene: Scene) -> Iterator[_BatchPositions]:
    """Yields the positions of each batch's rows, in the order in which the batches came."""
    previous: dict[str, Tensor] = {}
    by_round = groupby(scene.gradients(), key=lambda batch: (batch.place, batch.round))
    for (place, round_), group in by_round:
        batches = [*group]
        gradients = [batch.came.double().flatten(1) for batch in batches]
        direction_D = common_direction(torch.cat(gradients))
        previous_D = previous.get(place)
        if previous_D is not None and previous_D @ direction_D < 0:
            direction_D = -direction_D
        previous[place] = direction_D
        for batch, g_BD in zip(batches, gradients, strict=True):
            yield _BatchPositions(place, round_, batch.rows, (g_BD @ direction_D).numpy())


def _sum_positions(batches: list[_BatchPositions], count: int) -> Numbers:
    """Returns the sum of each row's positions over all rounds, [N]."""
    scores_N = np.zeros(count)
    for batch in batches:
        np.add.at(scores_N, batch.rows, batch.positions)
    return scores_N


RESIDUALS = Attack(
    "numbers as labels from each row's gradient", "passive", play_residuals, "gradients"
)
