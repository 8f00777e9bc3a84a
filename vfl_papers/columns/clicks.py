"""Logs of advertisements: categories and numbers, of which a sample of the rows is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.columns.official import ColumnFiles, damage_error, row_count_note
from vfl_papers.dataset import TEST, TRAIN, Content, ContentPart, Division, Request
from vfl_papers.dividing import make_parts, pick_columns
from vfl_party.base.seeds import derive_seed, draw_permutation

OPTIONS: Mapping[str, tuple[Any, str]] = {
    "train": (100_000, "Rows drawn at random for training."),
    "test": (20_000, "Rows drawn at random for testing."),
    "buckets": (
        0,
        "If greater than 0, the buckets into which each column of categories is hashed; needed for "
        "a column of more than 1,048,576 categories.",
    ),
}
# The width of a category's embedding: FedHSSL, Appendix A.
ENCODER = {"kind": "tabular", "hidden": [128], "category_size": 32}
FEDHSSL = recipes.fedhssl(ENCODER, 128, batch_size=512)


def draw_rows(table: ColumnFiles, label: str, published: int, request: Request) -> Content:
    """Reads the label of every row, and draws rows for training and testing. Raises InputError if
    there are fewer.
    """
    clicks = table.of({label: pa.int8()}).array(label)
    wrong = (clicks != 0) & (clicks != 1)
    if wrong.any():
        row = int(wrong.argmax()) + 1
        raise damage_error(table.files[0].source, f"row {row:,} has a label that is not 0 or 1")
    train, test = _counts(request, len(clicks))
    order = draw_permutation(derive_seed(request.seed, "prepare", "clicks"), len(clicks))
    splits = np.repeat(np.array([TRAIN, TEST], object), [train, test])
    rows = order[: train + test]
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    return Content(
        clicks[rows].astype(np.int64),
        splits[by_row],
        lambda own: table.blocks(rows[own]),
        classes=("no click", "click"),
        differs=row_count_note(len(clicks), published),
    )


def _counts(request: Request, n: int) -> tuple[int, int]:
    train, test = (request.options[key] for key in (TRAIN, TEST))
    right = all(type(number) is int and number > 0 for number in (train, test))
    if not right or train + test > n:
        raise InputError(
            Code.CONFIG_INVALID,
            f"train, test: must be positive integers whose sum is at most {n:,} (got {train!r} "
            f"and {test!r}). Give smaller numbers.",
        )
    return train, test


def halves(categories: Sequence[str], numbers: Sequence[str], **data: Any) -> Division:
    """Returns the division of FedHSSL: every party has the same number of columns of both kinds.

    ``data``: keys of every party's ``[data]``.
    """

    def make(_: Content, request: Request) -> Sequence[ContentPart]:
        k, buckets = request.parties, request.options["buckets"]
        max_parties = min(len(categories), len(numbers))
        if not 0 < k <= max_parties or type(buckets) is not int:
            raise InputError(
                Code.CONFIG_INVALID,
                f"parties, buckets: must be 1 to {max_parties} parties, and an integer number "
                f"of buckets (got {k} and {buckets!r}). Correct them.",
            )
        own = [
            [*ours, *theirs]
            for ours, theirs in zip(
                np.array_split(categories, k), np.array_split(numbers, k), strict=True
            )
        ]
        settings = data | ({"categorical_buckets": buckets} if buckets > 0 else {})
        parts = make_parts(request, [pick_columns([str(name) for name in names]) for names in own])
        return [replace(part, settings={**part.settings, **settings}) for part in parts]

    return Division("the same share of the categories and of the numbers", make)
