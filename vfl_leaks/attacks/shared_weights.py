"""Membership inference from weights that a phase shares, as the server or a peer receives them.

A row has two scores. *Fit* is the similarity of two views of the row under the shared weights.
Training rows fit better. This is the loss threshold of Yeom et al. (CSF 2018) for self-supervised
training. *Span* is the share of the row's direction in the row space of a linear layer's change.
The change is a sum of outer products of gradients and inputs, so its row space contains the
directions of the training rows. Both scores need an encoder below the shared layers.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_leaks.fitting import Inputs, draw_view, embed
from vfl_leaks.scene import Attack, Figure, Owner, Scene, UnfitError
from vfl_leaks.scores import Numbers, fold_auc, median_and_high
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc
from vfl_party.models import TwoTowers, build_predictor, build_projector, seed_torch

Weights = Mapping[str, Tensor]
Flags = npt.NDArray[np.bool_]
# Maximum and minimum number of candidates, for the training rows and for the held-out rows.
_MAX_ROWS, _MIN_ROWS = 2000, 20
# Number of pairs of views of a row.
_VIEWS = 4
# The layer whose input is the encoder's embedding.
_LAYER = "projector.0.weight"
_ENERGY = 0.99
# Number of shuffles of the membership for chance.
_SHUFFLES = 50


@dataclass(frozen=True, eq=False)
class Upload:
    """A party's shared weights after a round's training. ``before``: the weights before the round,
    if known.
    """

    round: int
    weights: Weights
    before: Weights | None = None


@dataclass(frozen=True, eq=False)
class AttackerView:
    """An attacker's means to compute embeddings of rows. ``knows``: a description of them.

    ``encoder``: the attacker's encoder. ``inputs``: returns the encoder's arguments for rows.
    ``beside``: {baseline: the weights that it uses instead of the shared weights}.
    """

    knows: str
    encoder: nn.Module
    inputs: Callable[[Rows], Inputs]
    beside: Mapping[str, Weights] = field(default_factory=dict)


@dataclass
class SharedWeights:
    """The weights that one phase shared, as one attacker received them.

    ``sent``: {round: {party: the weights that it sent}}. ``means``: {round: the mean of the
    parties' weights}.
    """

    sent: dict[int, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    means: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def newest(self, party: str) -> Weights:
        """Returns a party's last weights."""
        return next(
            of_party[party]
            for _, of_party in sorted(self.sent.items(), reverse=True)
            if party in of_party
        )


def collect_shared(scene: Scene) -> SharedWeights:
    """Returns the weights that the last phase with shared weights sent. Raises UnfitError if no
    phase shares weights.
    """
    weights, phase = SharedWeights(), ""
    for message in scene.heard():
        if not message.name:
            continue
        if message.phase != phase:
            phase, weights = message.phase, SharedWeights()
        if message.sender in scene.owners:
            weights.sent.setdefault(message.round, {}).setdefault(message.sender, {})[
                message.name
            ] = message.tensor
        else:
            weights.means.setdefault(message.round, {})[message.name] = message.tensor
    if not weights.sent:
        raise UnfitError("no phase shares weights")
    return weights


def collect_uploads(scene: Scene) -> dict[str, list[Upload]]:
    """Returns {party: its uploads}, as far as the attacker can compute them. Raises UnfitError if
    it can compute none.

    The server receives the weights of each party. A peer receives the mean of all weights, and
    subtracts its own weights to get the mean of the other parties' weights.
    """
    messages, by_party = collect_shared(scene), dict[str, list[Upload]]()
    for round_, sent in sorted(messages.sent.items()):
        mean = messages.means.get(round_)
        weights_by_party: Mapping[str, Weights] = sent
        if scene.role != "server":
            weights_by_party = (
                {} if mean is None else _subtract_own(scene, sent[scene.attacker], mean)
            )
        for name, weights in weights_by_party.items():
            by_party.setdefault(name, []).append(
                Upload(round_, weights, messages.means.get(round_ - 1))
            )
    if not by_party:
        raise UnfitError("the attacker received no mean of the weights")
    return by_party


def _subtract_own(scene: Scene, own: Weights, mean: Weights) -> dict[str, Weights]:
    """Returns {each other party: the mean of the other parties' weights}."""
    count = len(scene.owners)
    others_mean = {
        name: (count * mean[name].double() - own[name].double()) / (count - 1) for name in mean
    }
    return dict.fromkeys((name for name in scene.owners if name != scene.attacker), others_mean)


def get_tower(encoder: nn.Module) -> nn.Module:
    """Returns the encoder whose upper layers are shared: the local tower of two towers."""
    return encoder.local if isinstance(encoder, TwoTowers) else encoder


def draw_untrained(encoder: nn.Module, seed: int) -> nn.Module:
    """Returns a copy of an encoder with new random weights."""
    fresh = copy.deepcopy(encoder)
    with seed_torch(derive_seed(seed, "init", "untrained encoder")):
        for module in fresh.modules():
            if callable(draw := getattr(module, "reset_parameters", None)):
                draw()
    return fresh


def draw_untrained_top(encoder: nn.Module, weights: Weights, seed: int) -> Weights:
    """Returns random, untrained weights with the names and shapes of ``weights``."""
    with seed_torch(derive_seed(seed, "init", "untrained top")):
        projector, predictor = _build_heads(weights)
    fresh = draw_untrained(encoder, seed)
    state = {f"encoder.{name}": tensor for name, tensor in fresh.state_dict().items()}
    for part, module in (("projector", projector), ("predictor", predictor)):
        state |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
    return {name: state[name].cpu() for name in weights}


def _build_heads(weights: Weights) -> tuple[nn.Module, nn.Module]:
    """Builds a projector and a predictor with the layer widths of the weights."""
    layers = sorted(
        int(name.split(".")[1]) for name, tensor in weights.items() if _is_layer(name, tensor)
    )
    shapes = [weights[f"projector.{number}.weight"].shape for number in layers]
    if not shapes:
        raise UnfitError("the shared weights have no projector")
    projector = build_projector(shapes[0][1], [shape[0] for shape in shapes])
    predictor: nn.Module = nn.Identity()
    if "predictor.0.weight" in weights:
        hidden, width = weights["predictor.0.weight"].shape
        predictor = build_predictor(width, hidden)
    return projector, predictor


def _is_layer(name: str, weight: Tensor) -> bool:
    return name.startswith("projector.") and name.endswith(".weight") and weight.dim() == 2


@torch.no_grad()
def score_fit(encoder: nn.Module, weights: Weights, inputs: Inputs, seed: int) -> Numbers:
    """Returns the fit of each row, [N]: the mean cosine similarity of the predictor's and the
    projector's outputs (p and z) for two views of the row.
    """
    tower = copy.deepcopy(encoder)
    top = {
        name.removeprefix("encoder."): tensor
        for name, tensor in weights.items()
        if name.startswith("encoder.")
    }
    tower.load_state_dict(tower.state_dict() | top)
    projector, predictor = _build_heads(weights)
    for part, module in (("projector", projector), ("predictor", predictor)):
        state = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"{part}.")
        }
        # The parties do not send BatchNorm's counter num_batches_tracked.
        module.load_state_dict(state, strict=False)
        module.to(inputs[0].device).eval()
    random = torch.Generator().manual_seed(derive_seed(seed, "views") % 2**63)
    rows_N, total = np.arange(len(inputs[0])), torch.zeros(len(inputs[0]), dtype=torch.float64)
    for _ in range(_VIEWS):
        z1, z2 = (projector(embed(tower, draw_view(inputs, rows_N, random))) for _ in range(2))
        for p, z in ((predictor(z1), z2), (predictor(z2), z1)):
            total += functional.cosine_similarity(p, z).double().cpu()
    score: Numbers = (total / (2 * _VIEWS)).numpy()
    return score


@torch.no_grad()
def score_span(encoder: nn.Module, changes: Sequence[Tensor], inputs: Inputs) -> Numbers:
    """Returns the span of each row, [N]: the share of its direction in the row space of a layer's
    change, as the mean over the changes.

    The share is the length of the part of h / ‖h‖ inside the row space. The row space of a change
    of full rank contains all directions, so there the share is ‖Δ·h‖ / (‖Δ‖·‖h‖).
    """
    h_NE = functional.normalize(embed(encoder, inputs).double().cpu(), dim=1)
    parts = [(h_NE @ _find_directions(change).T).norm(dim=1) for change in changes]
    score: Numbers = torch.stack(parts).mean(dim=0).numpy()
    return score


def _find_directions(change: Tensor) -> Tensor:
    """Returns an orthogonal basis of a change's row space, [R, E]. Its vectors have length one, or,
    for a change of full rank, lengths in proportion to the singular values.
    """
    _, values, right = torch.linalg.svd(change.double(), full_matrices=False)
    rank, _ = compute_spectrum(change)
    lengths = (
        torch.ones(rank) if rank < change.shape[1] else values / values.norm().clamp_min(1e-300)
    )
    directions: Tensor = lengths[:, None] * right[: len(lengths)]
    return directions


def compute_changes(received: Sequence[Upload]) -> list[Tensor]:
    """Returns the change of the first layer above the encoder in each round for which the weights
    before the round are known.
    """
    return [
        upload.weights[_LAYER] - upload.before[_LAYER]
        for upload in received
        if upload.before and _LAYER in upload.weights
    ]


def compute_spectrum(change: Tensor) -> tuple[int, int]:
    """Returns the numerical rank of a change, and the number of directions with 99 % of its
    energy.
    """
    values = torch.linalg.svdvals(change.double())
    tolerance = values[0] * max(change.shape) * torch.finfo(torch.float32).eps
    energy = (values.square().cumsum(0) / values.square().sum().clamp_min(1e-300)) < _ENERGY
    return int((values > tolerance).sum()), min(len(values), int(energy.sum()) + 1)


def yield_figures(
    scene: Scene, owner: str, received: Sequence[Upload], eyes: Sequence[AttackerView]
) -> Iterator[Figure]:
    """Yields the AUC with which fit and span distinguish the rows that ``owner`` trained on from
    its held-out rows.

    Raises UnfitError if there are not enough rows.
    """
    rows_N, trained_N = _draw_candidates(
        scene, owner, min(len(scene.labels), *_count_rows(scene, owner))
    )
    random = np.random.default_rng(derive_seed(scene.seed, "shuffled rows"))
    shuffled_SN = [random.permutation(trained_N) for _ in range(_SHUFFLES)]
    changes = compute_changes(received)
    for eye in eyes:
        inputs, newest = eye.inputs(rows_N), received[-1].weights
        tops = {
            "": newest,
            **eye.beside,
            "untrained top": draw_untrained_top(eye.encoder, newest, scene.seed),
        }
        scores = {
            name: score_fit(eye.encoder, top, inputs, scene.seed) for name, top in tops.items()
        }
        yield _figure(
            f"{owner}: rows it trained on, by fit", eye.knows, scores, trained_N, shuffled_SN
        )
        if changes:
            random_directions = torch.Generator().manual_seed(
                derive_seed(scene.seed, "directions") % 2**63
            )
            noise = [
                torch.randn(change.shape, generator=random_directions, dtype=torch.float64)
                for change in changes
            ]
            scores = {
                "": score_span(eye.encoder, changes, inputs),
                "random directions": score_span(eye.encoder, noise, inputs),
            }
            yield _figure(
                f"{owner}: rows it trained on, by span", eye.knows, scores, trained_N, shuffled_SN
            )


def describe_rank(owner: str, received: Sequence[Upload]) -> str:
    """Returns a sentence about the rank of the changes; '' if no change is known."""
    ranks = [compute_spectrum(change) for change in compute_changes(received)]
    if not ranks:
        return ""
    width = min(received[0].weights[_LAYER].shape)
    rank, directions = (statistics.median(values) for values in zip(*ranks, strict=True))
    return (
        f"{owner}: a round changes the first layer above the encoder by a matrix of rank "
        f"{rank:g} of {width} (99 % of its energy in {directions:g} directions), so it has at "
        "least as many inputs"
    )


def _figure(
    target: str,
    knows: str,
    scores: Mapping[str, Numbers],
    trained_N: Flags,
    shuffled_SN: Sequence[Flags],
) -> Figure:
    """Returns the figure of the score named ''. The other scores are its baselines, and shuffled
    membership is chance.
    """
    value = fold_auc(auc(scores[""], trained_N))
    chance, chance_high = median_and_high(
        [fold_auc(auc(scores[""], trained_S)) for trained_S in shuffled_SN]
    )
    beside = {name: fold_auc(auc(score, trained_N)) for name, score in scores.items() if name}
    return Figure(target, knows, "AUC", value, None, chance, chance_high, beside)


def _count_rows(scene: Scene, owner: str) -> list[int]:
    """Returns the number of rows of the owner, and of the attacker if it is a party."""
    names = [owner, *([scene.attacker] if scene.attacker in scene.owners else [])]
    return [
        1 + max(int(rows.max()) for rows in scene.owners[name].rows.values() if len(rows))
        for name in names
    ]


def _draw_candidates(scene: Scene, owner: str, count: int) -> tuple[Rows, Flags]:
    """Draws as many training rows as held-out rows of ``owner``. Returns all of them, and flags of
    the training rows.
    """
    splits = scene.owners[owner].rows
    random = np.random.default_rng(derive_seed(scene.seed, "candidates", owner))
    trained = splits.get("local", splits["train"])
    held_out = np.concatenate([splits["validation"], splits["test"]])
    groups = [random.permutation(rows[rows < count])[:_MAX_ROWS] for rows in (trained, held_out)]
    size = min(map(len, groups))
    if size < _MIN_ROWS:
        raise UnfitError(
            f"the attack needs {_MIN_ROWS} training rows, and as many for validation or test, that "
            "all parties have"
        )
    groups = [rows[:size] for rows in groups]
    return np.concatenate(groups), np.repeat([True, False], size)


def make_view(
    knows: str, owner: Owner, encoder: nn.Module | None = None, **beside: Weights
) -> AttackerView:
    """Returns the view of an attacker with the owner's columns, and with ``encoder`` or else the
    owner's encoder.
    """
    return AttackerView(
        knows,
        get_tower(owner.encoder) if encoder is None else encoder,
        owner.inputs,
        {name.replace("_", " "): weights for name, weights in beside.items()},
    )


# Membership inference by the server, from the weights that a party uploads.
#
# The server itself has no encoder and no columns. The figures are for two stronger attackers. The
# first has the columns of the candidate rows and a random encoder. The second has the party's
# encoder and columns; it is an oracle, whose figure is the maximum leak of the weights to an
# insider.
def play_uploads(scene: Scene) -> list[Figure]:
    """Returns the AUC with which fit and span find the training rows of each party. Raises
    UnfitError if no phase shares weights.
    """
    figures = list[Figure]()
    for name, received in collect_uploads(scene).items():
        owner = scene.owners[name]
        views = [
            make_view(
                "the rows' columns, no encoder",
                owner,
                draw_untrained(get_tower(owner.encoder), scene.seed),
            ),
            make_view("its encoder and columns (an oracle)", owner),
        ]
        figures += yield_figures(scene, name, received, views)
        figures[-1] = replace(figures[-1], note=describe_rank(name, received))
    return figures


UPLOADS = Attack(
    "rows that a party trained on, from shared weights, by the server",
    "server",
    play_uploads,
    "weights",
)


# Membership inference by a peer, from the mean of shared weights and its own view of the rows.
#
# The peer subtracts its own weights from the mean. With two parties, the result is the other
# party's weights; with more parties, it is the mean of the other parties' weights. The peer puts
# these weights on its own encoder, because the other parties never share their lower layers. Its
# own encoder was trained on the same rows, so training rows fit better even without the shared
# weights. The baselines are therefore its own top layers and untrained top layers.
def play_tops(scene: Scene) -> list[Figure]:
    """Returns the AUC with which fit and span find the training rows of each other party. Raises
    UnfitError if no phase shares weights.
    """
    figures, own_weights = list[Figure](), collect_shared(scene).newest(scene.attacker)
    for owner, received in collect_uploads(scene).items():
        view = make_view(
            "own encoder, own columns", scene.owners[scene.attacker], own_top=own_weights
        )
        figures += yield_figures(scene, owner, received, [view])
        figures[-1] = replace(figures[-1], note=describe_rank(owner, received))
    return figures


TOPS = Attack(
    "rows that a party trained on, from shared weights, by a peer", "party", play_tops, "weights"
)
