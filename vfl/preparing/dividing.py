"""Divides a data set among parties: cuts of images, runs of columns, views, whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from vfl.preparing.content import TRAIN, Array, Block, Content, ContentPart, Rows
from vfl.preparing.dataset import Division, Request
from vfl_common.errors import Code, InputError
from vfl_party.base.deal import deal

# The party that has the labels and no images, if whole rows are dealt.
LABELS = "labels"
EVEN: dict[str, Any] = {"how": "even"}

Pick = Callable[[Block], Block]


def name_parts(request: Request, picks: Sequence[Pick]) -> list[ContentPart]:
    """Returns parts ``party-1``, ``party-2`` and so on, the active one first."""
    parts = [
        ContentPart(f"party-{number}", pick, label=number == request.active)
        for number, pick in enumerate(picks, 1)
    ]
    return sorted(parts, key=lambda part: not part.label)


def _run(n: int, part: int, parts: int) -> slice:
    """Returns the ``part``-th of ``parts`` runs of ``range(n)``, the longer ones first."""
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


def _cut(part: int, down: int, across: int, block: Block) -> Array:
    """Returns one of ``down`` times ``across`` tiles of images [n, H, W, …], row by row of tiles.
    If a side cannot be divided evenly, its first tiles are longer.
    """
    assert isinstance(block, np.ndarray)  # noqa: S101 - a division of images
    rows = _run(block.shape[1], part // across, down)
    return block[:, rows, _run(block.shape[2], part % across, across)]


def _quarters(_: Content, request: Request) -> list[ContentPart]:
    return name_parts(request, [partial(_cut, part, 2, 2) for part in range(4)])


def _halves(_: Content, request: Request) -> list[ContentPart]:
    return name_parts(request, [partial(_cut, part, 1, 2) for part in range(2)])


def _strips(_: Content, request: Request) -> list[ContentPart]:
    k = request.parties
    return name_parts(request, [partial(_cut, part, 1, k) for part in range(k)])


def _columns(content: Content, request: Request) -> list[ContentPart]:
    first = next(content.blocks(np.arange(1)))
    assert isinstance(first, pa.Table)  # noqa: S101 - a division of columns
    names, k = first.column_names, request.parties
    if k > len(names):
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties: must be at most {len(names)}, the number of columns (got {k}). Give fewer.",
        )
    return name_parts(request, [columns(names[_run(len(names), part, k)]) for part in range(k)])


def columns(names: Sequence[str]) -> Pick:
    """Returns a function that picks columns by name."""

    def pick(block: Block) -> Block:
        assert isinstance(block, pa.Table)  # noqa: S101 - of columns
        return block.select(list(names))

    return pick


def _whole(block: Block) -> Block:
    return block


def _rows(content: Content, request: Request) -> list[ContentPart]:
    parts = [
        ContentPart(f"client-{k}", _whole, rows)
        for k, rows in enumerate(_deal_rows(content, request), 1)
    ]
    return [ContentPart(LABELS, None, label=True), *parts]


def _deal_rows(content: Content, request: Request) -> list[Rows]:
    """Deals the training rows as requested, and all others evenly. Raises InputError."""
    how, k, seed = dealing(request.deal), request.parties, request.seed
    train_N = np.full(len(content), True) if content.splits is None else content.splits == TRAIN
    dealt: list[list[Rows]] = [[] for _ in range(k)]
    for rows, keys in ((np.flatnonzero(train_N), how), (np.flatnonzero(~train_N), EVEN)):
        if len(rows):
            for own, places in zip(
                dealt, deal(content.labels[rows], k, seed=seed, **keys), strict=True
            ):
                own.append(rows[places])
    return [np.sort(np.concatenate(rows)) for rows in dealt]


def dealing(text: str) -> dict[str, Any]:
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


QUARTERS = Division(
    "quarters of each image: top left, top right, bottom left, bottom right", _quarters, (4,)
)
HALVES = Division("the left and the right half of each image", _halves, (2,))
STRIPS = Division("upright strips of each image, as equal as possible", _strips)
COLUMNS = Division("runs of neighbouring columns, as equal as possible", _columns)
ROWS = Division(
    "whole images, which are dealt to clients; another party has the labels", _rows, aligned=False
)
# The divisions of images.
IMAGE_DIVISIONS = {"quadrants": QUARTERS, "halves": HALVES, "strips": STRIPS, "rows": ROWS}
