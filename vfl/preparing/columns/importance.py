"""Divides columns between two parties by their importance (FedOnce, section 5.5, Fig. 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl.preparing.content import Content, ContentPart
from vfl.preparing.dataset import Division, Request
from vfl.preparing.dividing import make_parts, pick_columns
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, draw_permutation

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
    from vfl_party.models.boosting import lightgbm

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


IMPORTANCE = Division(
    "columns by their importance in boosted trees: alpha of the better half to the labels' party",
    _by_importance,
    (2,),
    settings=tuple(ALPHA),
)
