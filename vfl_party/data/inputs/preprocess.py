"""Converts a table to encoder inputs, with statistics and vocabularies of the training rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.inputs.features import (
    HIDDEN,
    MISSING,
    RESERVED,
    UNKNOWN,
    Codes,
    ColumnPlace,
    Features,
    Floats,
)
from vfl_party.data.inputs.ranges import Span, count_outside, spans_of
from vfl_party.data.inputs.scaled import ScaledPixels
from vfl_party.data.inputs.statistics import (
    FilledValues,
    compute_quantiles,
    compute_scaling,
    fill_values,
    to_normal,
)
from vfl_party.data.join import select_part
from vfl_party.data.number_formats import SIGNS
from vfl_party.data.pixels import Pixels, is_whole, to_unit
from vfl_party.data.row_arrays import parts_of, release
from vfl_party.data.table import Categories, Table, count_words
from vfl_party.models import InputSpec

# The maximum number of one-hot columns. More columns are probably a mistake.
MAX_ONE_HOT = 4096


@dataclass(frozen=True)
class Preprocessor:
    """The preprocessing of a table, learnt from its training rows.

    ``x = (value - shift) / scale``, by column or channel. A column with ``quantiles`` is mapped by
    ``to_normal`` instead.

    Args:
        fill: The values that replace missing numbers or pixels, [F] or [C * H * W]; None if no
            value may be missing.
        kinds: The kinds of the training table's columns, see ``columns.Columns``; None if unknown.
        style: The style of the training table's numbers, see ``columns.Columns``; None if unknown.
        spans: The range of each numeric column, see ``ranges``; None for images, or if unknown.
    """

    numeric_names: tuple[str, ...]
    categorical_names: tuple[str, ...]
    # Channels, height and width; None for columns.
    image_shape: tuple[int, ...] | None
    fill: tuple[float, ...] | None
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    vocabularies: tuple[tuple[str, ...], ...]
    one_hot: bool
    flatten: bool
    kinds: Mapping[str, str] | None = None
    style: tuple[str, str] | None = None
    spans: tuple[Span, ...] | None = None
    # The quantiles of each column, empty for other scalings; None if no column has quantiles.
    quantiles: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def fit(
        cls,
        table: Table,
        train_rows: Codes,
        *,
        one_hot: bool,
        flatten: bool,
        settings: DataSettings,
        tabular: bool = True,
    ) -> Preprocessor:
        """Learns the preprocessing from the training rows.

        Args:
            table: All rows. For a joined table, the preprocessing of each part is learnt with the
                part's own settings.
            train_rows: The positions of the training rows in the table, int64.
            one_hot: Whether categories become one-hot columns after the numeric columns: one for
                "missing" and one for each category. An unknown category is all zeros. Otherwise
                categories become codes for a tabular encoder.
            flatten: Whether images become rows of pixels.
            settings: The settings of the table.
            tabular: Whether the method supports a tabular encoder, for the advice in an error.

        Raises InputError if there is nothing to learn from.
        """
        if settings.parts:
            parts = [
                (select_part(table, settings, name), part_settings)
                for name, part_settings in settings.parts.items()
                if part_settings.columns != ()
            ]
            return cls._concat(
                [
                    cls.fit(
                        part,
                        train_rows,
                        one_hot=one_hot,
                        flatten=flatten,
                        settings=part_settings,
                        tabular=tabular,
                    )
                    for part, part_settings in parts
                ]
            )
        if len(train_rows) == 0:
            raise checks.unusable(
                table.source,
                "no training rows are left. Give more rows, or make the other splits smaller.",
            )
        values = _get_values(table)
        if values is None and table.categorical is None:
            raise checks.unusable(
                table.source,
                "has no features. Name some, or set features = false for the party.",
            )
        fill, shift, scale, quantile_table = None, np.zeros(0), np.zeros(0), None
        if values is not None:
            if settings.missing != "error":
                fill = fill_values(values, train_rows, settings.missing)
            filled = FilledValues(table, values, fill)
            shift, scale = compute_scaling(filled, train_rows, settings.scale)
            if settings.scale == "quantile" and table.images_NCHW is not None:
                raise checks.unusable(
                    table.source, 'scale = "quantile" is for columns (got images). Use "minmax".'
                )
            if settings.scale == "quantile":
                quantile_table = tuple(map(tuple, compute_quantiles(filled, train_rows).tolist()))
        vocabularies = []
        for k, name in enumerate(table.categorical_names):
            assert table.categorical is not None  # noqa: S101 - it has a name for each column
            word_counts = count_words(table.categorical, k, train_rows)[:-1]
            categories = [
                word
                for word, count in zip(
                    table.categorical.words[k], word_counts.tolist(), strict=True
                )
                if count
            ]
            vocabularies.append(tuple(sorted(categories)))
            if one_hot and sum(map(len, vocabularies)) > MAX_ONE_HOT:
                raise checks.unusable(
                    table.source,
                    f"column {name!r} has too many categories for separate columns (got "
                    f"{len(categories)}). List it in data.drop, or use an encoder of kind "
                    '"tabular".'
                    if tabular
                    else f"column {name!r} has too many categories for separate columns (got "
                    f"{len(categories)}). List it in data.drop.",
                )
        return cls(
            numeric_names=table.numeric_names,
            categorical_names=table.categorical_names,
            image_shape=None if table.images_NCHW is None else table.images_NCHW.shape[1:],
            fill=None if fill is None else tuple(fill.tolist()),
            shift=tuple(shift.tolist()),
            scale=tuple(scale.tolist()),
            vocabularies=tuple(vocabularies),
            one_hot=one_hot,
            flatten=flatten,
            kinds=dict(table.kinds),
            style=table.style,
            spans=None if table.numeric_NF is None else spans_of(table.numeric_NF, train_rows),
            quantiles=quantile_table,
        )

    @property
    def spec(self) -> InputSpec:
        """The shape and the cardinalities of the inputs that ``transform`` returns."""
        if self.image_shape is not None:
            return InputSpec((math.prod(self.image_shape),) if self.flatten else self.image_shape)
        if self.one_hot:
            return InputSpec(
                (len(self.numeric_names) + sum(1 + len(words) for words in self.vocabularies),)
            )
        return InputSpec(
            (len(self.numeric_names),), tuple(RESERVED + len(words) for words in self.vocabularies)
        )

    @classmethod
    def _concat(cls, parts: list[Preprocessor]) -> Preprocessor:
        """Returns one preprocessor for the columns of all parts. The parts must not have images."""

        def join(key: str) -> tuple[Any, ...]:
            return tuple(value for part in parts for value in getattr(part, key))

        # A part without fill values has no missing numbers, so the zeros are never used.
        fills = [part.fill if part.fill is not None else (0.0,) * len(part.shift) for part in parts]
        return replace(
            parts[0],
            numeric_names=join("numeric_names"),
            categorical_names=join("categorical_names"),
            fill=None
            if all(part.fill is None for part in parts)
            else tuple(value for fill in fills for value in fill),
            shift=join("shift"),
            scale=join("scale"),
            vocabularies=join("vocabularies"),
            kinds={name: kind for part in parts for name, kind in (part.kinds or {}).items()},
            style=None,
            spans=tuple(span for part in parts for span in part.spans or ()),
            quantiles=None
            if all(part.quantiles is None for part in parts)
            else tuple(
                values for part in parts for values in part.quantiles or ((),) * len(part.shift)
            ),
        )

    def transform(self, table: Table) -> Features:
        """Converts all rows of a table to encoder inputs. The table must have the columns or the
        image shape of training.

        Columns that training did not have are ignored. Raises InputError if a column is missing.
        """
        table = self._align(table)
        if table.images_NCHW is not None and is_whole(table.images_NCHW):
            return Features(self._scale_pixels(table.source, table.images_NCHW))
        values, words, space, n = _get_values(table), table.categorical, table.space, len(table)
        fill = None if self.fill is None else np.array(self.fill)
        filled = None if values is None else FilledValues(table, values, fill)
        code_tables = (
            []
            if words is None
            else [_list_codes(*pair) for pair in zip(words.words, self.vocabularies, strict=True)]
        )
        numbers = self.spec.shape
        x = space.empty((n, *numbers), np.float32)
        codes_NK = (
            space.empty((n, len(code_tables)), np.int64)
            if words is not None and not self.one_hot
            else None
        )
        for part in parts_of(x):
            columns = [] if filled is None else [self._scale(table.source, filled[part])]
            if words is not None:
                codes_BK = np.stack(
                    [
                        code_table[words.codes_NK[part, k]]
                        for k, code_table in enumerate(code_tables)
                    ],
                    axis=1,
                )
                if codes_NK is not None:
                    codes_NK[part] = codes_BK
                else:
                    columns.append(self._encode_one_hot(codes_BK))
                release(words.codes_NK)
            if columns:
                x[part] = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            release(x, *([] if codes_NK is None else [codes_NK]))
        cardinalities = (
            tuple(RESERVED + len(known) for known in self.vocabularies)
            if codes_NK is not None
            else ()
        )
        return Features.of(x, codes_NK, cardinalities, self._find_places())

    def _find_places(self) -> dict[str, ColumnPlace]:
        """Returns the position of each column of the table in the encoder inputs."""
        places = {
            name: ColumnPlace(slice(at, at + 1)) for at, name in enumerate(self.numeric_names)
        }
        end = len(self.numeric_names)
        for k, (name, words) in enumerate(
            zip(self.categorical_names, self.vocabularies, strict=True)
        ):
            if self.one_hot:
                places[name] = ColumnPlace(slice(end, end + 1 + len(words)))
                end += 1 + len(words)
            else:
                places[name] = ColumnPlace(categories=slice(k, k + 1))
        return places

    def cells(self, table: Table) -> tuple[Floats, Codes, tuple[str, ...]]:
        """Returns a table's numbers, float32 [N, F] with NaN if missing, the codes of its
        categories, int64 [N, K], and the names of all columns.

        Pixels are numbers with names such as ``pixel 0``. Raises InputError if a column of training
        is missing.
        """
        table = self._align(table)
        values, words, n = _get_values(table), table.categorical, len(table)
        numbers_NF = (
            np.empty((n, 0), np.float32)
            if values is None
            else np.asarray(values if values.dtype == np.float32 else to_unit(values)).reshape(
                n, math.prod(values.shape[1:])
            )
        )
        codes_NK = np.empty((n, len(self.vocabularies)), np.int64)
        for k, vocabulary in enumerate(self.vocabularies):
            assert words is not None  # noqa: S101 - it has a name for each column
            codes_NK[:, k] = _list_codes(words.words[k], vocabulary)[words.codes_NK[:, k]]
        names = self.numeric_names or tuple(
            f"pixel {place}" for place in range(numbers_NF.shape[1])
        )
        return numbers_NF, codes_NK, (*names, *self.categorical_names)

    def unseen(self, table: Table) -> dict[str, int]:
        """Returns for each column the number of rows with a category that training did not have;
        columns without such rows are left out. Raises InputError.
        """
        table, unseen = self._align(table), {}
        for k, (name, known) in enumerate(
            zip(self.categorical_names, self.vocabularies, strict=True)
        ):
            assert table.categorical is not None  # noqa: S101 - it has a name for each column
            seen = set(known)
            is_new = np.array([word not in seen for word in table.categorical.words[k]], bool)
            unseen[name] = int(count_words(table.categorical, k)[:-1][is_new].sum())
        return {name: count for name, count in unseen.items() if count}

    def outside(self, table: Table) -> dict[str, int]:
        """Returns for each column how many numbers are outside the range of training; {} if the
        ranges are unknown. Raises InputError.
        """
        values = self._align(table).numeric_NF
        if values is None or not self.spans:
            return {}
        counts = count_outside(values, self.spans).tolist()
        return {
            name: count for name, count in zip(self.numeric_names, counts, strict=True) if count
        }

    def state(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return {member.name: getattr(self, member.name) for member in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Preprocessor:
        """Restores the object from ``state``, which may have passed through JSON."""
        return cls(**{key: _to_tuples(value) for key, value in state.items()})

    def _align(self, table: Table) -> Table:
        """Returns the table with the columns of training, in their order. Raises InputError."""
        shape = None if table.images_NCHW is None else table.images_NCHW.shape[1:]
        if shape != self.image_shape:
            wanted, present = (
                " x ".join(map(str, sizes)) if sizes else "none"
                for sizes in (self.image_shape, shape)
            )
            raise checks.unusable(
                table.source,
                f"training had images of {wanted} (got {present}). Give images of the same shape.",
            )
        for kind, ours, theirs, others in (
            ("numbers", self.numeric_names, table.numeric_names, table.categorical_names),
            ("categories", self.categorical_names, table.categorical_names, table.numeric_names),
        ):
            for name in sorted(set(ours) - set(theirs)):
                if name in others:
                    raise checks.unusable(
                        table.source,
                        f"column {name!r} held {kind} in training but does not now. Correct the "
                        "column.",
                    )
                suggestion = checks.suggest_names(
                    name, [*table.numeric_names, *table.categorical_names]
                )
                raise checks.unusable(
                    table.source,
                    f"has no column {name!r}, but training had it{suggestion}. Add the column.",
                )
        if self.kinds is not None:
            _check_kinds(table.source, self.numeric_names, self.kinds, table.kinds)
        return Table(
            table.source,
            table.ids,
            numeric_NF=_select_columns(table.numeric_NF, table.numeric_names, self.numeric_names),
            numeric_names=self.numeric_names,
            categorical=_select_words(table, self.categorical_names),
            categorical_names=self.categorical_names,
            images_NCHW=table.images_NCHW,
            space=table.space,
        )

    def _scale(self, source: str, values_B: Floats) -> Floats:
        shape = (1, -1, *(1 for _ in values_B.shape[2:]))
        shift, scale = np.array(self.shift).reshape(shape), np.array(self.scale).reshape(shape)
        with np.errstate(over="ignore"):
            scaled_B = (values_B - shift) / scale
            for column, quantiles in enumerate(self.quantiles or ()):
                if quantiles:
                    scaled_B[:, column] = to_normal(
                        values_B[:, column].astype(np.float64), np.array(quantiles)
                    )
            x_B: Floats = scaled_B.astype(np.float32)
        if not np.isfinite(x_B).all():
            raise checks.unusable(
                source, "has values too far from those of training to be scaled. Correct them."
            )
        return x_B.reshape(len(x_B), -1) if self.flatten else x_B

    def _scale_pixels(self, source: str, pixels: Pixels) -> ScaledPixels:
        """Returns images that are scaled batch by batch, with the same results as ``_scale``."""
        values_V = np.arange(np.iinfo(pixels.dtype).max + 1).astype(pixels.dtype)
        shape = (len(values_V), pixels.shape[1], 1, 1)
        x_VC = self._scale(source, np.broadcast_to(to_unit(values_V).reshape(-1, 1, 1, 1), shape))
        inputs_CV = np.ascontiguousarray(x_VC.reshape(shape[:2]).T)
        return ScaledPixels(pixels, inputs_CV, flatten=self.flatten)

    def _encode_one_hot(self, codes_NK: Codes) -> Floats:
        widths = [1 + len(words) for words in self.vocabularies]
        columns = np.zeros((len(codes_NK), sum(widths)), np.float32)
        for k, offset in enumerate(np.cumsum([0, *widths[:-1]])):
            rows = np.flatnonzero(codes_NK[:, k] != UNKNOWN)
            columns[rows, offset + np.maximum(codes_NK[rows, k] - HIDDEN, 0)] = 1.0
        return columns


_KINDS = {"": "bare numbers", "date": "dates"} | {sign: f"numbers with {sign}" for sign in SIGNS}


def _check_kinds(
    source: str, names: tuple[str, ...], before: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Raises InputError if a numeric column holds another kind of values, such as dates or
    percentages, than in training.
    """
    for name in names:
        was, now_is = (
            _KINDS.get(kinds.get(name, ""), kinds.get(name, "")) for kinds in (before, now)
        )
        if was != now_is:
            raise checks.unusable(
                source,
                f"column {name!r} held {was} in training and holds {now_is} now. Write it as in "
                "training.",
            )


def _get_values(table: Table) -> Pixels | None:
    return table.numeric_NF if table.images_NCHW is None else table.images_NCHW


def _list_codes(words: tuple[str, ...], vocabulary: tuple[str, ...]) -> Codes:
    """Returns the code of each word, followed by the code of a missing category; see
    ``Features``.
    """
    code_by_word = {word: RESERVED + place for place, word in enumerate(vocabulary)}
    return np.array([*(code_by_word.get(word, UNKNOWN) for word in words), MISSING], np.int64)


def _select_words(table: Table, ours: tuple[str, ...]) -> Categories | None:
    if table.categorical is None or not ours:
        return None
    theirs = table.categorical_names
    return (
        table.categorical
        if ours == theirs
        else table.categorical.select([theirs.index(name) for name in ours])
    )


def _select_columns(
    values: npt.NDArray[Any] | None, theirs: tuple[str, ...], ours: tuple[str, ...]
) -> npt.NDArray[Any] | None:
    if values is None or not ours:
        return None
    return values if ours == theirs else values[:, [theirs.index(name) for name in ours]]


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list | tuple) else value
