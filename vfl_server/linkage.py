"""The server's part in a fuzzy linkage: it links the rows of each passive party with those of the
active party by their encodings. See ``vfl_party.align.fuzzy``.

The encodings are in memory only. The server lacks their key, and each party sends its rows in a
secret order. So the server learns the sizes, the links, and how similar rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Hub, Kind, StepKey, TensorSpec
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.linkage import (
    ENCODING_BYTES,
    MAX_ROWS,
    ROWS_A_BATCH,
    Encodings,
    count_batches,
    link,
)
from vfl_common.psi import PHASE

_NO_QUALITY = np.zeros(0, "<f4")
_MIN_THRESHOLD, _MAX_THRESHOLD = 0.2, 0.95
_ROWS = BundleSpec(
    Kind.ROWS,
    {"rows": TensorSpec(DType.INT64, (1,)), "threshold": TensorSpec(DType.FLOAT32, (1,))},
)


def serve_linkage(recipe: Recipe, max_rows: int, hub: Hub) -> Callable[[], None]:
    """Serves the steps of a fuzzy linkage. Returns a function that answers the last step.

    ``max_rows``: The maximum number of rows of a party. Raises PeerError (REFUSED) if a party has
    more rows.
    """
    parties = [recipe.active.name, *(party.name for party in recipe.passives)]
    step = StepKey(PHASE, 1, 0)
    replies = hub.collect(step, _ROWS)
    rows = {
        party: int(np.frombuffer(replies[party].tensors["rows"].data, "<i8")[0])
        for party in parties
    }
    for party, count in rows.items():
        if not 0 < count <= min(max_rows, MAX_ROWS):
            raise PeerError(
                Code.REFUSED,
                f"{party}: announces {count:,} rows, and a fuzzy linkage compares 1 to "
                f"{min(max_rows, MAX_ROWS):,}. Use fewer rows.",
                party=party,
            )
    active = recipe.active.name
    asked = float(np.frombuffer(replies[active].tensors["threshold"].data, "<f4")[0])
    # 0 means that the server estimates it; the other values are those of the recipe.
    threshold = float(np.clip(asked, _MIN_THRESHOLD, _MAX_THRESHOLD)) if asked > 0.0 else None
    sizes = np.array([rows[party] for party in parties], "<i8")
    hub.reply(step, {party: _bundle(rows=sizes) for party in parties})
    pieces: dict[str, list[bytes]] = {party: [] for party in parties}
    count = count_batches(rows.values())
    for batch in range(count):
        step = StepKey(PHASE, 1, 1 + batch)
        for party, bundle in hub.collect(step, _make_specs(rows, batch)).items():
            pieces[party].append(bytes(bundle.tensors["encodings"].data))
        if batch < count - 1:
            nothing = _answer(np.zeros(0, np.int64), np.zeros((0, 2), np.float32), _NO_QUALITY)
            hub.reply(step, dict.fromkeys(parties, nothing))
    encodings = {
        party: np.frombuffer(b"".join(data), np.uint8).reshape(-1, ENCODING_BYTES)
        for party, data in pieces.items()
    }
    answers = _link_all(parties, encodings, threshold)
    return lambda: hub.reply(step, answers)


def _make_specs(rows: Mapping[str, int], batch: int) -> dict[str, BundleSpec]:
    specs = {}
    for party, count in rows.items():
        size = max(0, min(ROWS_A_BATCH, count - batch * ROWS_A_BATCH))
        spec = TensorSpec(DType.UINT8, (size, ENCODING_BYTES))
        specs[party] = BundleSpec(Kind.ROWS, {"encodings": spec})
    return specs


def _link_all(
    parties: list[str], encodings: Mapping[str, Encodings], threshold: float | None
) -> dict[str, Bundle]:
    """Returns {party: the answer about its rows}. Rows that all parties have are common."""
    active, *passives = parties
    links = {party: link(encodings[active], encodings[party], threshold) for party in passives}
    size = len(encodings[active])
    is_common = np.ones(size, bool)
    for one in links.values():
        is_linked = np.zeros(size, bool)
        is_linked[one.first] = True
        is_common &= is_linked
    # The active party sends its rows in a secret order, so their order reveals nothing.
    rank_N = np.where(is_common, np.cumsum(is_common) - 1, -1)
    worst = min(links.values(), key=lambda one: one.precision)
    quality = np.array([worst.threshold, worst.precision, worst.recall], "<f4")
    pairs_N2 = np.ones((size, 2), np.float32)
    for one in links.values():
        own = np.stack([one.similarity, one.probability], axis=1)
        pairs_N2[one.first] = np.minimum(pairs_N2[one.first], own)
    answers = {active: _answer(rank_N, _blank(pairs_N2, rank_N), quality)}
    for party, one in links.items():
        rank_M = np.full(len(encodings[party]), -1, np.int64)
        rank_M[one.second] = rank_N[one.first]
        pairs_M2 = np.zeros((len(rank_M), 2), np.float32)
        pairs_M2[one.second] = np.stack([one.similarity, one.probability], axis=1)
        answers[party] = _answer(rank_M, _blank(pairs_M2, rank_M), quality)
    return answers


def _blank(pairs: npt.NDArray[np.float32], rank: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns the pairs without those of rows that are not common."""
    return np.where((rank >= 0)[:, None], pairs, np.float32(0.0))


def _answer(
    ranks: npt.NDArray[np.int64], pairs: npt.NDArray[np.float32], quality: npt.NDArray[np.float32]
) -> Bundle:
    return _bundle(ranks=ranks.astype("<i8"), pairs=pairs.astype("<f4"), quality=quality)


_TYPES = {"<i8": DType.INT64, "<f4": DType.FLOAT32}


def _bundle(**arrays: npt.NDArray[np.generic]) -> Bundle:
    return Bundle(
        Kind.ROWS,
        {
            name: Buffer(_TYPES[array.dtype.str], array.shape, memoryview(array.tobytes()))
            for name, array in arrays.items()
        },
    )
