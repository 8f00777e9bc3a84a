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
