"""Divides a data set among parties: tiles of images, ranges of columns, views, or whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.errors import Code, InputError
from vfl_papers.dataset import (
    TRAIN,
    Array,
    Block,
    Content,
    ContentPart,
    Division,
    Request,
    Rows,
)
from vfl_party.base.seeds import deal, derive_seed, draw_permutation

# The name of the party with the labels in a division by rows. It has no images.
LABELS = "labels"
EVEN: dict[str, Any] = {"how": "even"}

Pick = Callable[[Block], Block]


def make_parts(request: Request, picks: Sequence[Pick]) -> list[ContentPart]:
    """Returns parts named ``party-1``, ``party-2`` and so on, the active party first."""
    parts = [
        ContentPart(f"party-{number}", pick, label=number == request.active)
        for number, pick in enumerate(picks, 1)
    ]
    return sorted(parts, key=lambda part: not part.label)


def _cut_range(n: int, part: int, parts: int) -> slice:
    """Cuts ``range(n)`` into ``parts`` slices, the longer ones first, and returns one of them."""
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


def _cut_tile(part: int, down: int, across: int, block: Block) -> Array:
    """Cuts images [n, H, W, …] into ``down`` times ``across`` tiles, and returns the tile with the
    number ``part``, counted row by row. If a side cannot be divided evenly, its first tiles are
    longer.
    """
    assert isinstance(block, np.ndarray)  # noqa: S101 - this division is for images
    rows = _cut_range(block.shape[1], part // across, down)
    return block[:, rows, _cut_range(block.shape[2], part % across, across)]


def _make_quarters(_: Content, request: Request) -> list[ContentPart]:
    return make_parts(request, [partial(_cut_tile, part, 2, 2) for part in range(4)])


def _make_strips(_: Content, request: Request) -> list[ContentPart]:
    k = request.parties
    return make_parts(request, [partial(_cut_tile, part, 1, k) for part in range(k)])


def _make_column_ranges(content: Content, request: Request) -> list[ContentPart]:
    first_row = next(content.blocks(np.arange(1)))
    assert isinstance(first_row, pa.Table)  # noqa: S101 - this division is for columns
    names, k = first_row.column_names, request.parties
    if k > len(names):
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties: must be at most {len(names)}, the number of columns (got {k}). Give fewer.",
        )
    return make_parts(
        request, [pick_columns(names[_cut_range(len(names), part, k)]) for part in range(k)]
    )


def pick_columns(names: Sequence[str]) -> Pick:
    """Returns a function that selects columns of a block by name."""

    def pick(block: Block) -> Block:
        assert isinstance(block, pa.Table)  # noqa: S101 - this division is for columns
        return block.select(list(names))

    return pick


def _pick_all(block: Block) -> Block:
    return block


def _make_row_parts(content: Content, request: Request) -> list[ContentPart]:
    parts = [
        ContentPart(f"client-{k}", _pick_all, rows)
        for k, rows in enumerate(_deal_rows(content, request), 1)
    ]
    return [ContentPart(LABELS, None, label=True), *parts]


def _deal_rows(content: Content, request: Request) -> list[Rows]:
    """Deals the training rows as requested, and all other rows evenly. Raises InputError."""
    how, k, seed = parse_dealing(request.deal), request.parties, request.seed
    train_N = np.full(len(content), True) if content.splits is None else content.splits == TRAIN
    dealt: list[list[Rows]] = [[] for _ in range(k)]
    for rows, keys in ((np.flatnonzero(train_N), how), (np.flatnonzero(~train_N), EVEN)):
        if len(rows):
            for client_rows, places in zip(
                dealt, deal(content.labels[rows], k, seed=seed, **keys), strict=True
            ):
                client_rows.append(rows[places])
    return [np.sort(np.concatenate(rows)) for rows in dealt]


def parse_dealing(text: str) -> dict[str, Any]:
    """Converts ``even``, ``classes:2`` or ``dirichlet:0.5`` to keyword arguments of ``vfl.deal``.
    Raises InputError.
    """
    how, _, number = text.partition(":")
    try:
        if how == "classes" and number:
            return {"how": how, "classes": int(number)}
        if how == "dirichlet" and number:
            return {"how": how, "alpha": float(number)}
        if text == EVEN["how"]:
            return dict(EVEN)
    except ValueError:
        pass
    raise InputError(
        Code.CONFIG_INVALID,
        f"deal: unknown value {text!r}. Choose even, classes:N or dirichlet:ALPHA, such as "
        "classes:2.",
    )


# The setting of a data set that has this division.
ALPHA: Mapping[str, tuple[Any, str]] = {
    "alpha": (
        0.5,
        "With --divide importance: the share, from 0 to 1, of the more important half of the "
        "columns that the party with the labels gets.",
    )
}
_TREES = 100


def _by_importance(content: Content, request: Request) -> list[ContentPart]:
    """Returns two parts with equal numbers of columns, up to one.

    A random share alpha of the dominant columns goes to the party with the labels, the others to
    its partner. The other columns fill both up. The paper does not say how many are dominant: here
    half of them, so that the party with the labels has the best half at 1, and the worst half at 0.
    Raises InputError for an invalid alpha.
    """
    alpha = request.options["alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise InputError(
            Code.CONFIG_INVALID, f"alpha: must be from 0 to 1 (got {alpha!r}). Give a share."
        )
    tables = list(content.blocks(np.arange(len(content))))
    names, n = tables[0].column_names, len(tables[0].column_names)
    ranked_N = np.argsort(-_gains(tables, content, request.seed), kind="stable")
    shuffled_N = ranked_N[
        draw_permutation(derive_seed(request.seed, "importance", "dominant"), n // 2)
    ]
    others_N = ranked_N[n // 2 :]
    others_N = others_N[
        draw_permutation(derive_seed(request.seed, "importance", "rest"), len(others_N))
    ]
    best = round(alpha * len(shuffled_N))
    own_N = np.concatenate([shuffled_N[:best], others_N[: n - n // 2 - best]])
    partners_N = np.setdiff1d(np.arange(n), own_N)
    of = {request.active: own_N, 3 - request.active: partners_N}
    picks = [pick_columns([names[at] for at in np.sort(of[number])]) for number in (1, 2)]
    return make_parts(request, picks)


def _gains(tables: list[pa.Table], content: Content, seed: int) -> npt.NDArray[np.float64]:
    """Returns the gain of the splits on each column in LightGBM's boosted trees over all used rows,
    [N columns]. Raises InputError if LightGBM is missing.
    """
    from vfl_party.models.trees import lightgbm

    x_NF = np.concatenate([np.column_stack([column.to_numpy() for column in t]) for t in tables])
    settings: dict[str, Any] = {"objective": "binary" if content.classes else "regression"}
    if len(content.classes) > 2:
        settings = {"objective": "multiclass", "num_class": len(content.classes)}
    lgb = lightgbm("divide = importance")
    # One thread: the trees are then the same on every machine.
    fixed = {"seed": seed % 2**31, "deterministic": True, "num_threads": 1, "verbosity": -1}
    rows = lgb.Dataset(x_NF, label=content.labels)
    trees = lgb.train({**settings, **fixed}, rows, num_boost_round=_TREES)
    gains: npt.NDArray[np.float64] = trees.feature_importance(importance_type="gain")
    return gains


QUARTERS = Division(
    "quarters of each image: top left, top right, bottom left, bottom right", _make_quarters, (4,)
)
HALVES = Division("the left and the right half of each image", _make_strips, (2,))
STRIPS = Division("vertical strips of each image, as equal as possible", _make_strips)
COLUMNS = Division("ranges of neighbouring columns, as equal as possible", _make_column_ranges)
ROWS = Division(
    "whole images, which are dealt to clients; another party has the labels",
    _make_row_parts,
    aligned=False,
)
IMPORTANCE = Division(
    "columns by their importance in boosted trees: alpha of the better half to the labels' party",
    _by_importance,
    (2,),
    settings=tuple(ALPHA),
)
# {name: division} for data sets of images.
IMAGE_DIVISIONS = {"quadrants": QUARTERS, "halves": HALVES, "strips": STRIPS, "rows": ROWS}


Tables = dict[str, Any]


# CNN0 of FedOnce (Fig. 4), with the hidden layer of the guests (Table 2).
CNN0: Tables = {"kind": "cnn0", "hidden": [128]}


# Without the last layer, the embedding is the pooled output of ResNet. RESNET18 is for images of 32
# to 64 pixels per side, and LARGE_RESNET18 is for larger images.
RESNET18: Tables = {"kind": "resnet18", "last_layer": False}
LARGE_RESNET18: Tables = RESNET18 | {"small_images": False}


def _adam(lr: float, decay: float) -> Tables:
    return {"kind": "adam", "lr": lr, "weight_decay": decay}


def fedonce(
    encoder: Mapping[str, Any],
    top: Sequence[int],
    guest: tuple[float, float, int, int],
    host: tuple[float, float, int, int],
    *,
    d: int = 3,
    f: int = 1,
) -> Tables:
    """Returns the tables of FedOnce-L0 (Wu et al. 2022, Table 5).

    Args:
        encoder: The settings of the encoder.
        top: The hidden layers of the top model.
        guest: Learning rate η, weight decay λ, batch size b and epochs T of the guests.
        host: Learning rate, weight decay, batch size and epochs of the host.
        d: The width of a representation.
        f: The number of epochs from one matching to the next.
    """
    (guest_lr, guest_decay, guest_batch, guest_epochs) = guest
    (host_lr, host_decay, host_batch, host_epochs) = host
    local = {
        "kind": "fedonce",
        "epochs": guest_epochs,
        "batch_size": guest_batch,
        "match_every": f,
        "optimizer": _adam(guest_lr, guest_decay),
    }
    joint = {
        "kind": "head",
        "own_encoder": "trained",
        "epochs": host_epochs,
        "batch_size": host_batch,
        "optimizer": _adam(host_lr, host_decay),
    }
    model = {"embedding_size": d, "encoder": dict(encoder), "top": {"hidden": list(top)}}
    return {"model": model, "phases": [local, joint, {"kind": "evaluate"}]}


def fedhssl(
    encoder: Mapping[str, Any], d: int, *, rounds: int = 40, batch_size: int = 128
) -> Tables:
    """Returns the tables of FedHSSL-SimSiam with 40 % of the rows aligned and 200 of them labelled,
    followed by split training (He et al. 2022, Table IV and Appendix B).

    ``d`` is the width of an embedding, ``rounds`` the number of pretraining rounds, and
    ``batch_size`` the batch size of fine-tuning.
    """
    tuning = {
        "kind": "splitnn",
        "steps": 1000,
        "batch_size": batch_size,
        "validate_every": 50,
        "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
    }
    pretraining = {"kind": "fedhssl", "ssl": "simsiam", "rounds": rounds, "batch_size": 512}
    return {
        "rows": {"aligned": 0.4, "labelled": 200},
        "model": {"embedding_size": d, "encoder": dict(encoder)},
        "phases": [pretraining, tuning, {"kind": "evaluate"}],
    }


def ssvfl(network: str) -> Tables:
    """Returns the tables of SS-VFL-I: 200 epochs at each party alone, then 500 epochs of a linear
    layer (Castiglia et al. 2022, section 4). All rows are labelled unless ``rows.labelled`` is set.

    ``network`` is ``resnet18`` or ``resnet50``, for large images.
    """
    return {
        "model": {"embedding_size": 128, "encoder": {"kind": network, "small_images": False}},
        "phases": [
            {
                "kind": "contrastive",
                "ssl": "simclr",
                "projector": [],
                "rounds": 200,
                "batch_size": 512,
            },
            {"kind": "head", "epochs": 500, "batch_size": 64},
            {"kind": "evaluate"},
        ],
    }


def mocosfl(encoder: Mapping[str, Any] = RESNET18) -> Tables:
    """Returns the tables of MocoSFL-3 with the batch size for five clients, followed by a linear
    probe (Li et al. 2023, Appendix A.1). The image shape is added from the prepared data.
    """
    return {
        "model": {"embedding_size": 512, "encoder": dict(encoder)},
        "phases": [
            {
                "kind": "mocosfl",
                "cut": 3,
                "batch_size": 20,
                "queue": 6000,
            },
            {"kind": "probe"},
        ],
    }


def splitnn(encoder: Mapping[str, Any], d: int) -> Tables:
    """Returns the tables of split training, for a division that no paper uses."""
    return {
        "model": {"embedding_size": d, "encoder": dict(encoder)},
        "phases": [{"kind": "splitnn", "epochs": 20, "batch_size": 128}, {"kind": "evaluate"}],
    }
