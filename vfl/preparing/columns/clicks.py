"""Logs of advertisements: too many rows to train on, so some are drawn; categories and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from vfl.preparing import recipes
from vfl.preparing.columns.official import ColumnFiles, counted
from vfl.preparing.content import TEST, TRAIN, Content, Part
from vfl.preparing.dataset import Division, Request
from vfl.preparing.dividing import columns, named
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, permutation

OPTIONS: Mapping[str, tuple[Any, str]] = {
    "train": (100_000, "Rows that are drawn at random for training."),
    "test": (20_000, "Rows that are drawn at random for testing."),
    "buckets": (
        0,
        "If above 0, the buckets into which each column of categories is hashed; a column of more "
        "than 1,048,576 categories needs them.",
    ),
}
# The width of a category's embedding: FedHSSL, Appendix A.
ENCODER = {"kind": "tabular", "hidden": [128], "category_size": 32}
FEDHSSL = recipes.fedhssl(ENCODER, 128, batch_size=512)


def drawn(table: ColumnFiles, label: str, published: int, request: Request) -> Content:
    """Reads the label of every row, and draws rows of training and rows of testing. Raises
    InputError if there are not so many.
    """
    clicks = table.of({label: pa.int8()}).array(label)
    wrong = (clicks != 0) & (clicks != 1)
    if wrong.any():
        row = int(wrong.argmax()) + 1
        text = f"{table.files[0].source}: row {row:,} has a label that is not 0 or 1"
        raise InputError(Code.FILE_INVALID, f"{text}; get it from its makers again")
    train, test = _counts(request, len(clicks))
    order = permutation(derive_seed(request.seed, "prepare", "clicks"), len(clicks))
    splits = np.repeat(np.array([TRAIN, TEST], object), [train, test])
    rows = order[: train + test]
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    return Content(
        clicks[rows].astype(np.int64),
        splits[by_row],
        lambda own: table.blocks(rows[own]),
        classes=("no click", "click"),
        differs=counted(len(clicks), published),
    )


def _counts(request: Request, n: int) -> tuple[int, int]:
    train, test = (request.options[key] for key in (TRAIN, TEST))
    right = all(type(each) is int and each > 0 for each in (train, test))
    if not right or train + test > n:
        text = f"train, test: there are {n:,} rows; give two numbers from 1 that fit into them"
        raise InputError(Code.CONFIG_INVALID, text)
    return train, test


def halves(categories: Sequence[str], numbers: Sequence[str], **data: Any) -> Division:
    """Returns the division of FedHSSL: every party has as many columns of both kinds. ``data``:
    keys of every party's ``[data]``.
    """

    def make(_: Content, request: Request) -> Sequence[Part]:
        k, buckets = request.parties, request.options["buckets"]
        if not 0 < k <= min(len(categories), len(numbers)) or type(buckets) is not int:
            most = min(len(categories), len(numbers))
            text = f"parties, buckets: give 1 to {most} parties, and a whole number of buckets"
            raise InputError(Code.CONFIG_INVALID, text)
        own = [
            [*ours, *theirs]
            for ours, theirs in zip(
                np.array_split(categories, k), np.array_split(numbers, k), strict=True
            )
        ]
        settings = data | ({"categorical_buckets": buckets} if buckets > 0 else {})
        parts = named(request, [columns([str(each) for each in names]) for names in own])
        return [replace(part, settings={**part.settings, **settings}) for part in parts]

    return Division("the same share of the categories and of the numbers", make)
