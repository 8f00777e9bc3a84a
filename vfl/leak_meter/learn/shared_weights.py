"""Membership inference from weights that a phase shares, as the server or a peer receives them.

A row has two scores. *Fit*: the similarity of two views of it under the shared weights, the loss
threshold of Yeom et al. (CSF 2018) for self-supervised training: training rows fit better. *Span*:
a linear layer's change is a sum of outer products of gradients and inputs, so its row space
contains the inputs' directions; the score is the share of the row's direction in it. Both need an
encoder below the shared layers.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl.leak_meter.learn.fitting import Inputs, embed, view
from vfl.leak_meter.scene.scene import Figure, Owner, Scene, UnfitError
from vfl.leak_meter.scene.scores import Numbers, fold_auc, middle_and_high
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc
from vfl_party.models import TwoTowers, build_predictor, build_projector, seed_torch

Weights = Mapping[str, Tensor]
Flags = npt.NDArray[np.bool_]
# Maximum and minimum number of candidates among the training rows, and among the others.
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
    """A party's shared weights after a round's training. ``before``: those that the round began
    with, if known.
    """

    round: int
    weights: Weights
    before: Weights | None = None


@dataclass(frozen=True, eq=False)
class Eye:
    """The view of an attacker on rows: an encoder, and its arguments for rows.

    ``beside``: {baseline without the message: the weights in place of the shared ones}.
    """

    knows: str
    encoder: nn.Module
    inputs: Callable[[Rows], Inputs]
    beside: Mapping[str, Weights] = field(default_factory=dict)


@dataclass
class SharedWeights:
    """The weights that one phase shared, as one attacker received them.

    ``sent``: {round: {party: weights}}; ``means``: {round: weights}.
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
    """Returns what the last phase that shares weights shared. Raises UnfitError if there is
    none.
    """
    shared_, phase = SharedWeights(), ""
    for message in scene.heard():
        if not message.name:
            continue
        if message.phase != phase:
            phase, shared_ = message.phase, SharedWeights()
        if message.sender in scene.owners:
            shared_.sent.setdefault(message.round, {}).setdefault(message.sender, {})[
                message.name
            ] = message.tensor
        else:
            shared_.means.setdefault(message.round, {})[message.name] = message.tensor
    if not shared_.sent:
        raise UnfitError("no phase shares weights")
    return shared_


def uploads(scene: Scene) -> dict[str, list[Upload]]:
    """Returns {party: its uploads}, as far as the attacker can compute them. Raises UnfitError if
    there are none.

    The server receives the weights of each party. A peer receives the mean, and subtracts its own
    weights to get the mean of the others.
    """
    messages, by_party = collect_shared(scene), dict[str, list[Upload]]()
    for round_, of_party in sorted(messages.sent.items()):
        mean = messages.means.get(round_)
        own_weights: Mapping[str, Weights] = of_party
        if scene.role != "server":
            own_weights = {} if mean is None else _others(scene, of_party[scene.attacker], mean)
        for name, weights in own_weights.items():
            by_party.setdefault(name, []).append(
                Upload(round_, weights, messages.means.get(round_ - 1))
            )
    if not by_party:
        raise UnfitError("the attacker received no mean of the weights")
    return by_party


def _others(scene: Scene, own: Weights, mean: Weights) -> dict[str, Weights]:
    """Returns the mean of the others' weights, for each of them."""
    count = len(scene.owners)
    rest = {name: (count * mean[name].double() - own[name].double()) / (count - 1) for name in mean}
    return dict.fromkeys((name for name in scene.owners if name != scene.attacker), rest)


def tower_of(encoder: nn.Module) -> nn.Module:
    """Returns the encoder whose top is shared: of two, the local one."""
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
    """Returns weights of the same names and shapes that no training has changed."""
    with seed_torch(derive_seed(seed, "init", "untrained top")):
        projector, predictor = _heads(weights)
    fresh = draw_untrained(encoder, seed)
    state = {f"encoder.{name}": tensor for name, tensor in fresh.state_dict().items()}
    for part, module in (("projector", projector), ("predictor", predictor)):
        state |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
    return {name: state[name].cpu() for name in weights}


def _heads(weights: Weights) -> tuple[nn.Module, nn.Module]:
    """Builds projector and predictor of the widths that the weights have."""
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
def fit(encoder: nn.Module, weights: Weights, inputs: Inputs, seed: int) -> Numbers:
    """Returns the similarity of two views of each row under shared weights, [N]: the mean cosine of
    p and z.
    """
    tower = copy.deepcopy(encoder)
    top = {
        name.removeprefix("encoder."): tensor
        for name, tensor in weights.items()
        if name.startswith("encoder.")
    }
    tower.load_state_dict(tower.state_dict() | top)
    projector, predictor = _heads(weights)
    for part, module in (("projector", projector), ("predictor", predictor)):
        own = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"{part}.")
        }
        # Without BatchNorm's counter.
        module.load_state_dict(own, strict=False)
        module.to(inputs[0].device).eval()
    drawn = torch.Generator().manual_seed(derive_seed(seed, "views") % 2**63)
    rows_N, total = np.arange(len(inputs[0])), torch.zeros(len(inputs[0]), dtype=torch.float64)
    for _ in range(_VIEWS):
        z1, z2 = (projector(embed(tower, view(inputs, rows_N, drawn))) for _ in range(2))
        for p, z in ((predictor(z1), z2), (predictor(z2), z1)):
            total += functional.cosine_similarity(p, z).double().cpu()
    score: Numbers = (total / (2 * _VIEWS)).numpy()
    return score


@torch.no_grad()
def span(encoder: nn.Module, changes: Sequence[Tensor], inputs: Inputs) -> Numbers:
    """Returns how much of each row's direction the changes of a layer have, [N]: the mean over the
    changes.

    It is the part of h / ‖h‖ inside a change's row space. A change of full rank has all directions:
    then it is ‖Δ·h‖ / (‖Δ‖·‖h‖).
    """
    h_NE = functional.normalize(embed(encoder, inputs).double().cpu(), dim=1)
    parts = [(h_NE @ _ways(change).T).norm(dim=1) for change in changes]
    score: Numbers = torch.stack(parts).mean(dim=0).numpy()
    return score


def _ways(change: Tensor) -> Tensor:
    """Returns the directions [R, E] of a change, of length one; of full rank, in proportion to its
    singular values.
    """
    _, values, right = torch.linalg.svd(change.double(), full_matrices=False)
    rank, _ = spectrum(change)
    lengths = (
        torch.ones(rank) if rank < change.shape[1] else values / values.norm().clamp_min(1e-300)
    )
    directions: Tensor = lengths[:, None] * right[: len(lengths)]
    return directions


def changes_of(received: Sequence[Upload]) -> list[Tensor]:
    """Returns the change of the first layer above the encoder in each round whose beginning is
    known.
    """
    return [
        upload.weights[_LAYER] - upload.before[_LAYER]
        for upload in received
        if upload.before and _LAYER in upload.weights
    ]


def spectrum(change: Tensor) -> tuple[int, int]:
    """Returns the numerical rank of a change, and the number of directions with 99 % of its
    energy.
    """
    values = torch.linalg.svdvals(change.double())
    tolerance = values[0] * max(change.shape) * torch.finfo(torch.float32).eps
    energy = (values.square().cumsum(0) / values.square().sum().clamp_min(1e-300)) < _ENERGY
    return int((values > tolerance).sum()), min(len(values), int(energy.sum()) + 1)


def judge(
    scene: Scene, owner: str, received: Sequence[Upload], eyes: Sequence[Eye]
) -> Iterator[Figure]:
    """Yields the AUC of fit and span of rows that ``owner`` trained on against those that it held
    out.

    Raises UnfitError without enough rows.
    """
    rows_N, trained_N = _candidates(scene, owner, min(len(scene.labels), *_lengths(scene, owner)))
    random = np.random.default_rng(derive_seed(scene.seed, "shuffled rows"))
    shuffled_SN = [random.permutation(trained_N) for _ in range(_SHUFFLES)]
    changes = changes_of(received)
    for eye in eyes:
        inputs, newest = eye.inputs(rows_N), received[-1].weights
        tops = {
            "": newest,
            **eye.beside,
            "untrained top": draw_untrained_top(eye.encoder, newest, scene.seed),
        }
        scores = {name: fit(eye.encoder, top, inputs, scene.seed) for name, top in tops.items()}
        yield _figure(
            f"{owner}: rows it trained on, by fit", eye.knows, scores, trained_N, shuffled_SN
        )
        if changes:
            drawn = torch.Generator().manual_seed(derive_seed(scene.seed, "directions") % 2**63)
            noise = [
                torch.randn(change.shape, generator=drawn, dtype=torch.float64)
                for change in changes
            ]
            scores = {
                "": span(eye.encoder, changes, inputs),
                "random directions": span(eye.encoder, noise, inputs),
            }
            yield _figure(
                f"{owner}: rows it trained on, by span", eye.knows, scores, trained_N, shuffled_SN
            )


def describe_rank(owner: str, received: Sequence[Upload]) -> str:
    """Returns a sentence about the rank of the changes; '' if none is known."""
    ranks = [spectrum(change) for change in changes_of(received)]
    if not ranks:
        return ""
    width = min(received[0].weights[_LAYER].shape)
    rank, directions = (statistics.median(values) for values in zip(*ranks, strict=True))
    return (
        f"{owner}: a round changes the first layer above the encoder by a matrix of rank {rank:g} "
        "of "
        f"{width} (99 % of its energy in {directions:g} directions), so it has at least as many "
        "inputs"
    )


def _figure(
    of: str,
    knows: str,
    scores: Mapping[str, Numbers],
    trained_N: Flags,
    shuffled_SN: Sequence[Flags],
) -> Figure:
    """Returns the figure of the score '' with the others and shuffled membership as baselines."""
    value = fold_auc(auc(scores[""], trained_N))
    chance, chance_high = middle_and_high(
        [fold_auc(auc(scores[""], trained_S)) for trained_S in shuffled_SN]
    )
    beside = {name: fold_auc(auc(score, trained_N)) for name, score in scores.items() if name}
    return Figure(of, knows, "AUC", value, None, chance, chance_high, beside)


def _lengths(scene: Scene, owner: str) -> list[int]:
    """Returns how many rows the owner has, and the attacker if it is a party."""
    names = [owner, *([scene.attacker] if scene.attacker in scene.owners else [])]
    return [
        1 + max(int(rows.max()) for rows in scene.owners[name].rows.values() if len(rows))
        for name in names
    ]


def _candidates(scene: Scene, owner: str, count: int) -> tuple[Rows, Flags]:
    """Returns as many rows that ``owner`` trained on as it held out, and which of them are the
    former.
    """
    splits = scene.owners[owner].rows
    random = np.random.default_rng(derive_seed(scene.seed, "candidates", owner))
    trained = splits.get("local", splits["train"])
    held = np.concatenate([splits["validation"], splits["test"]])
    parts = [random.permutation(rows[rows < count])[:_MAX_ROWS] for rows in (trained, held)]
    count_ = min(map(len, parts))
    if count_ < _MIN_ROWS:
        raise UnfitError(
            f"the attack needs {_MIN_ROWS} training rows, and as many for validation or test, that "
            "all parties have"
        )
    parts = [rows[:count_] for rows in parts]
    return np.concatenate(parts), np.repeat([True, False], count_)


def eye_of(knows: str, owner: Owner, encoder: nn.Module | None = None, **beside: Weights) -> Eye:
    """Returns the eye of somebody who has an owner's columns, and its encoder or another."""
    chosen = tower_of(owner.encoder) if encoder is None else encoder
    return Eye(
        knows,
        chosen,
        owner.inputs,
        {name.replace("_", " "): weights for name, weights in beside.items()},
    )
