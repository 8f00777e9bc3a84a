"""A party's rows, divided into splits and made ready for encoders."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.data import Features, Labels, Preprocessor, Table
from vfl_party.seeds import Rows, split_rows


@dataclass(frozen=True)
class Prepared:
    """A party's rows, ready for encoders."""

    table: Table
    preprocessor: Preprocessor | None  # None: an active party with labels only
    features: Features | None
    labels: Labels | None
    targets: Tensor | None
    splits: dict[str, Rows]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ids, encoder inputs and targets, hexadecimal: equal only for the same data, prepared alike."""
        digest = hashlib.sha256("\x00".join(self.table.ids).encode())
        tensors = [self.targets] if self.features is None else [self.features.x, self.features.categories, self.targets]
        for tensor in tensors:
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


def divide_rows(recipe: Recipe, count: int) -> dict[str, Rows]:
    """Returns the splits of ``count`` rows. Raises InputError if fewer are for training than must be labelled."""
    rows = recipe.rows
    splits = split_rows(
        recipe.seed,
        count,
        validation=rows.validation,
        test=rows.test,
        aligned=rows.aligned,
        labelled=rows.labelled,
    )
    if rows.labelled is not None and len(splits["train"]) < rows.labelled:
        text = f"recipe: rows: labelled = {rows.labelled}, but only {len(splits['aligned'])} rows are aligned and for"
        raise InputError(Code.CONFIG_INVALID, f"{text} training; ask for fewer, or give more rows")
    return splits


def prepare(
    recipe: Recipe,
    name: str,
    table: Table,
    settings: DataSettings,
    encoder: EncoderSettings,
    unaligned: Table | None = None,
) -> Prepared:
    """Splits the rows and learns statistics, vocabularies and classes from the training rows. Raises InputError.

    ``unaligned``: rows that only this party has; they come after those of ``table``, in the split ``local``.
    """
    place, splits = recipe.party(name), divide_rows(recipe, len(table.ids))
    preprocessor = features = labels = targets = None
    if place is None or place.features:
        preprocessor = Preprocessor.fit(
            table,
            splits["local"],
            one_hot=encoder.kind != "tabular",
            flatten=encoder.kind in ("mlp", "tabular"),
            settings=settings,
        )
        features = preprocessor.transform(table)
        if unaligned is not None:
            features = features.followed_by(preprocessor.transform(unaligned))
            own = np.arange(len(table), len(table) + len(unaligned), dtype=np.int64)
            splits["local"] = np.concatenate([splits["local"], own])
    if place is not None and place.role == "active":
        scale = settings.label_scale
        labels = Labels.fit(table.labels, recipe.task, splits["train"], source=table.source, scale=scale)
        targets = labels.encode(table.labels) if table.labels is not None else None
    return Prepared(table, preprocessor, features, labels, targets, splits)
