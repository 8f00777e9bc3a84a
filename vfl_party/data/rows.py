"""Divides a party's rows into splits, and prepares them for encoders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import (
    Rows,
    cut_order,
    derive_seed,
    draw_permutation,
    move_fold_first,
    split_rows,
    stratify_order,
)
from vfl_party.data import Features, Labels, Preprocessor, Table
from vfl_party.data.inputs.weights import check_classes, check_weights
from vfl_party.data.row_arrays import parts, release
from vfl_party.models import needs_codes

# float64 represents all whole numbers up to this number exactly.
_WHOLE = 2**53
# The number of ids that are hashed at once.
_CHUNK = 1 << 14
# The splits. A row's code in a division is the position of the smallest split that contains it.
CODES = ("local", "aligned", "train", "validation", "test")


@dataclass(frozen=True)
class Prepared:
    """A party's rows, prepared for encoders."""

    table: Table
    # None for an active party that has only labels.
    preprocessor: Preprocessor | None
    features: Features | None
    labels: Labels | None
    targets: Tensor | None
    splits: dict[str, Rows]
    # The split of each row, see ``division_of``; None if every party derives the splits itself.
    division: bytes | None = None
    # The weight of each row in the loss, as in the table.
    weights: Tensor | None = None

    def cells(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]:
        """Returns the columns of the table, see ``Preprocessor.cells``. Raises InputError if the
        party has no features.
        """
        if self.preprocessor is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{self.table.source}: has no features. Give columns in data.columns.",
            )
        return self.preprocessor.cells(self.table)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of ids, encoder inputs and targets, in hexadecimal. It identifies the data
        and its preparation.
        """
        digest = hashlib.sha256()
        _hash_ids(digest, self.table.ids)
        if self.division is not None:
            digest.update(self.division)
        _hash_inputs(digest, self.features, self.targets, self.weights)
        return digest.hexdigest()

    @property
    def inputs_digest(self) -> str:
        """The SHA-256 of ids and encoder inputs, which is the same in all processes of a party."""
        digest = hashlib.sha256()
        _hash_ids(digest, self.table.ids)
        _hash_inputs(digest, self.features)
        return digest.hexdigest()


def _hash_ids(hasher: hashlib._Hash, ids: Sequence[str]) -> None:
    hasher.update(ids[0].encode() if ids else b"")
    for start in range(1, len(ids), _CHUNK):
        hasher.update("".join(f"\x00{id_}" for id_ in ids[start : start + _CHUNK]).encode())


def _hash_inputs(hasher: hashlib._Hash, features: Features | None, *more: Tensor | None) -> None:
    """Adds encoder inputs and the tensors ``more`` of the same rows to a digest."""
    arrays = features.arrays if features is not None else ()
    if features is not None:
        for block in features.blocks():
            hasher.update(block.contiguous().numpy().data)
            release(*arrays)
    for tensor in (features.categories if features is not None else None, *more):
        if tensor is None:
            continue
        for part in parts(len(tensor)):
            hasher.update(tensor[part].contiguous().numpy().data)
            release(*arrays)


def divide_rows(
    recipe: Recipe, count: int, what: str = "rows", *, drawn: bool = True
) -> dict[str, Rows]:
    """Returns the splits of ``count`` rows. ``what``: The word for the rows in errors. ``drawn``:
    See ``split_rows``.

    Raises InputError if there are fewer training rows than ``rows.labelled``.
    """
    rows = recipe.rows
    _check_folds(recipe, count, what)
    splits = split_rows(
        recipe.seed,
        count,
        validation=rows.validation,
        test=rows.test,
        aligned=rows.aligned,
        labelled=rows.labelled,
        folds=rows.folds,
        fold=rows.fold,
        drawn=drawn,
    )
    _check_labelled(recipe, splits)
    return splits


def division_of(recipe: Recipe, table: Table) -> bytes | None:
    """Returns the split of each row as one byte, a position in ``CODES``, if only the active party
    can divide the rows (``rows.split``).

    Returns None if every party derives the splits itself, or if the table is a passive party's.
    Raises InputError if the table lacks a column that ``rows.split`` needs, or if no training rows
    are left.
    """
    rows, n = recipe.rows, len(table)
    if table.splits is not None and rows.split != "column":
        raise InputError(
            Code.CONFIG_INVALID,
            f'{table.source}: data.split needs rows.split = "column" in the recipe (got '
            f'"{rows.split}"). Set it, or remove data.split.',
        )
    if rows.split == "random" or (table.labels is None and rows.align != "none"):
        return None
    splits = (
        _divide_groups(recipe, table)
        if rows.split == "grouped"
        else cut_order(*_order_rows(recipe, table), rows.aligned, rows.labelled)
    )
    _check_labelled(recipe, splits)
    division = encode_division(splits, n)
    if not is_division(division):
        raise InputError(
            Code.DATA_INVALID,
            f'{table.source}: rows.split = "{rows.split}" leaves no row for training. Give more '
            "rows.",
        )
    return division


def encode_division(splits: Mapping[str, Rows], n: int) -> bytes:
    """Returns one byte for each of ``n`` rows: the position in ``CODES`` of its smallest split."""
    codes = np.zeros(n, np.uint8)
    for code, name in enumerate(CODES):
        codes[splits[name]] = code
    return codes.tobytes()


def _order_rows(recipe: Recipe, table: Table) -> tuple[Rows, int, int]:
    """Returns an order of the rows for ``cut_order``, and the numbers of test and validation rows.
    The order follows a split column, or is stratified by classes.

    Raises InputError.
    """
    rows, n = recipe.rows, len(table)
    if rows.split == "column":
        if table.splits is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f'{table.source}: the recipe has rows.split = "column", and data.split is missing. '
                "Name the column that holds train, validation or test.",
            )
        order = draw_permutation(derive_seed(recipe.seed, "split"), n)
        rows_by_split = {
            split: order[table.splits[order] == split] for split in ("test", "validation", "train")
        }
        n_test, n_validation, order = (
            len(rows_by_split["test"]),
            len(rows_by_split["validation"]),
            np.concatenate([*rows_by_split.values()]),
        )
        _check_queries(recipe, table)
    else:
        if recipe.task.kind not in ("binary", "multiclass"):
            raise InputError(
                Code.CONFIG_INVALID,
                'recipe: rows.split = "stratified" divides by classes, and the task has none (got '
                f'task.kind = "{recipe.task.kind}"). Choose "random" or "column".',
            )
        assert table.labels is not None  # noqa: S101 - the recipe refuses it without an alignment
        _check_folds(recipe, n)
        n_validation = round(n * rows.validation)
        order = stratify_order(
            recipe.seed, np.unique(table.labels, return_inverse=True)[1].reshape(-1)
        )
        order, n_test = move_fold_first(order, round(n * rows.test), rows.folds, rows.fold)
    return order, n_test, n_validation


def _divide_groups(recipe: Recipe, table: Table) -> dict[str, Rows]:
    """Assigns whole groups to splits, and returns the rows of each split. Raises InputError."""
    if table.groups is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f'{table.source}: the recipe has rows.split = "grouped", and data.group is missing. '
            "Name the column that says which rows belong together.",
        )
    names, group_N = np.unique(table.groups, return_inverse=True)
    splits = divide_rows(recipe, len(names), what="groups")
    return {split: np.flatnonzero(np.isin(group_N, groups)) for split, groups in splits.items()}


def _check_queries(recipe: Recipe, table: Table) -> None:
    """Raises InputError if a split column gives rows of one query of a ranking different splits."""
    if recipe.task.kind != "ranking" or table.groups is None or table.splits is None:
        return
    query_N, split_N = (
        np.unique(values, return_inverse=True)[1].reshape(-1)
        for values in (table.groups, table.splits)
    )
    query_splits = np.unique(np.stack([query_N, split_N], axis=1), axis=0)
    divided_queries = int((np.bincount(query_splits[:, 0]) > 1).sum())
    if divided_queries:
        raise InputError(
            Code.DATA_INVALID,
            f"{table.source}: data.split gives the rows of {divided_queries} "
            f"{'query' if divided_queries == 1 else 'queries'} different splits. Give all rows of "
            "a query the same split.",
        )


def is_division(division: bytes) -> bool:
    """Returns whether every byte is a position in ``CODES``, and at least one row is for
    training.
    """
    codes = np.frombuffer(division, np.uint8)
    return bool((codes < len(CODES)).all() and (codes == CODES.index("train")).any())


def decode_division(division: bytes) -> dict[str, Rows]:
    """Returns the row numbers of each split, as ``split_rows`` does."""
    codes = np.frombuffer(division, np.uint8)
    local, aligned, train, validation, test = (codes == code for code in range(len(CODES)))
    splits = {"train": np.flatnonzero(train)}
    # Splits with the same rows share one array.
    splits["aligned"] = np.flatnonzero(aligned | train) if aligned.any() else splits["train"]
    splits["local"] = np.flatnonzero(local | aligned | train) if local.any() else splits["aligned"]
    return splits | {"validation": np.flatnonzero(validation), "test": np.flatnonzero(test)}


def _check_folds(recipe: Recipe, count: int, what: str = "rows") -> None:
    folds = recipe.rows.folds
    if folds is not None and count < folds:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: rows.folds must be at most {count}, the number of {what} (got {folds}). Use "
            f"fewer folds, or give more {what}.",
        )


def _check_labelled(recipe: Recipe, splits: dict[str, Rows]) -> None:
    wanted = recipe.rows.labelled
    if wanted is not None and len(splits["train"]) < wanted:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: rows.labelled must be at most {len(splits['train'])}, the number of aligned "
            f"training rows (got {wanted}). Reduce it, or give more rows.",
        )


def prepare(
    recipe: Recipe,
    name: str,
    table: Table,
    settings: DataSettings,
    encoder: EncoderSettings,
    unaligned: Sequence[Table] = (),
    division: bytes | None = None,
    *,
    tabular: bool = True,
    own_labels: bool = False,
) -> Prepared:
    """Splits the rows, and learns statistics, vocabularies and classes from the training rows.

    Args:
        recipe: The recipe of the run.
        name: The name of the party.
        table: The aligned rows of the party.
        settings: The settings of the table.
        encoder: The settings of the party's encoder.
        unaligned: Tables of rows that some parties lack. They come after the rows of ``table``, in
            the split ``local``.
        division: The splits from the active party, see ``division_of``; None to derive them here.
        tabular: Whether the method supports a tabular encoder, for the advice in an error.
        own_labels: Whether to use the labels of unaligned rows at the active party. These rows are
            then the split ``own``, unless ``rows.labelled`` limits the labels.

    Raises InputError.
    """
    if recipe.rows.align == "none" and unaligned:
        raise InputError(
            Code.CONFIG_INVALID,
            f'{table.source}: data.unaligned must be absent with rows.align = "none", where no '
            "row is aligned. Add these rows to data.source, and remove data.unaligned.",
        )
    party_settings = recipe.party(name)
    splits = (
        decode_division(division) if division is not None else divide_rows(recipe, len(table.ids))
    )
    preprocessor = features = labels = targets = weights = None
    if party_settings is None or party_settings.features:
        preprocessor = Preprocessor.fit(
            table,
            splits["local"],
            one_hot=not needs_codes(encoder),
            flatten=encoder.kind in ("mlp", "tabular", "raw"),
            settings=settings,
            tabular=tabular,
        )
        if (
            recipe.rows.align == "none"
            and preprocessor.image_shape is not None
            and settings.scale == "standard"
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f'{table.source}: data.scale = "standard" scales each party\'s images by its own '
                'rows, but the bottom models are averaged. Set data.scale = "minmax" at every '
                "party.",
            )
        features = preprocessor.transform(table)
        end = len(table)
        for more in unaligned:
            features = features.concat(preprocessor.transform(more), table.space)
            splits["local"] = np.concatenate(
                [splits["local"], np.arange(end, end := end + len(more), dtype=np.int64)]
            )
    if party_settings is not None and party_settings.role == "active":
        scale = settings.label_scale
        raw = _get_labels(table, settings, recipe.task.kind)
        _check_roles(recipe, table, settings)
        labels = Labels.fit(
            raw,
            recipe.task,
            splits["train"],
            source=table.source,
            scale=scale,
            names=settings.labels,
        )
        targets = labels.encode(raw) if raw is not None else None
        check_classes(recipe.task, labels)
        if settings.weight is not None:
            weights = check_weights(table.source, settings.weight, table.beside[settings.weight])
        if recipe.rows.fuzzy.weights and table.pairs_N2 is not None:
            probability = torch.from_numpy(table.pairs_N2[:, 1].copy())
            weights = probability if weights is None else weights * probability
        if own_labels and targets is not None and recipe.rows.labelled is None:
            labelled_tables = [more for more in unaligned if more.labels is not None]
            targets, weights = _append_labels(
                recipe, settings, labels, labelled_tables, targets, weights
            )
            own_rows = np.setdiff1d(splits["local"], splits["aligned"])
            splits["own"] = own_rows[own_rows < len(targets)]
    return Prepared(table, preprocessor, features, labels, targets, splits, division, weights)


def _append_labels(
    recipe: Recipe,
    settings: DataSettings,
    labels: Labels,
    more: Sequence[Table],
    targets: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Appends the targets and weights of the rows of ``more``, and returns both. Raises
    InputError.
    """
    for table in more:
        raw = _get_labels(table, settings, recipe.task.kind)
        assert raw is not None  # noqa: S101 - of tables with labels
        targets = torch.cat([targets, labels.encode(raw)])
        if weights is not None:
            more_weights = torch.ones(len(raw))
            if settings.weight is not None:
                column = table.beside[settings.weight]
                more_weights = check_weights(table.source, settings.weight, column)
            weights = torch.cat([weights, more_weights])
    return targets, weights


def _check_roles(recipe: Recipe, table: Table, settings: DataSettings) -> None:
    """Raises InputError if the settings name a role column that the recipe does not use."""
    kind, event, weight, group = recipe.task.kind, settings.event, settings.weight, settings.group
    if event is not None and kind != "survival":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{table.source}: data.event is for a survival task (got {kind}). Remove data.event.",
        )
    if weight is not None and recipe.task.compares:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{table.source}: data.weight cannot be used with a {kind} task, whose loss compares "
            "rows. Remove data.weight.",
        )
    if group is not None and kind != "ranking" and recipe.rows.split != "grouped":
        raise InputError(
            Code.CONFIG_INVALID,
            f'{table.source}: data.group is for a ranking task or rows.split = "grouped" (got a '
            f'{kind} task and rows.split = "{recipe.rows.split}"). Remove data.group.',
        )
    groups = table.groups
    if groups is not None and groups.dtype.kind == "f" and (np.abs(groups) > _WHOLE).any():
        raise InputError(
            Code.DATA_INVALID,
            f"{table.source}: group column {group!r} has numbers above 2^53, which are rounded. "
            "Begin each number with a letter.",
        )


def _get_labels(table: Table, settings: DataSettings, kind: str) -> npt.NDArray[Any] | None:
    """Returns the labels of the table, [N], or [N, labels] if there are several label columns."""
    pair_column = settings.group if kind == "ranking" else settings.event
    other_columns = (*settings.labels[1:], *([pair_column] if pair_column is not None else []))
    if table.labels is None or not other_columns:
        return table.labels
    columns = [table.labels, *(table.beside[name] for name in other_columns)]
    return np.stack([column.astype(object) for column in columns], axis=1)
