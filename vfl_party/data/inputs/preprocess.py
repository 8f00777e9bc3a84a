"""Turns a table into encoder inputs, with statistics and vocabularies of the training rows only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.cells.number_formats import SIGNS
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
    fill_values,
    quantiles,
    scaling,
    to_normal,
)
from vfl_party.data.join import part_of
from vfl_party.data.pixels import Pixels, is_whole, to_unit
from vfl_party.data.row_arrays import parts_of, release
from vfl_party.data.table import Categories, Table, count_words
from vfl_party.models import InputSpec

# Maximum number of one-hot columns; more are probably a mistake.
MAX_ONE_HOT = 4096


@dataclass(frozen=True)
class Preprocessor:
    """Statistics of the training rows.

    ``x = (value - shift) / scale``, by column or channel; a column with ``quantiles`` is mapped by
    ``to_normal``.

    Args:
        fill: replaces missing numbers (pixels), [F] or [C * H * W]; None if none may be missing.
        kinds, style: how the training table was written, see ``columns.Columns``; None if unknown.
        spans: the range of each numeric column, see ``ranges``; None for images, or if unknown.
    """

    numeric_names: tuple[str, ...]
    categorical_names: tuple[str, ...]
    # (channels, height, width); None of columns.
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
    # Quantiles of each column, empty for a column without; None if no column has any.
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
        """Learns from the training rows.

        Args:
            table: all rows; the parts of a joined table are learnt one by one, each with its own
                settings.
            train_rows: int64, positions in the table.
            one_hot: categories become columns after the numeric ones, one for "missing" and one for
                each category; "unknown" is all zeros. Otherwise they become codes for a tabular
                encoder.
            flatten: images become rows of pixels.
            settings: of the table.
            tabular: whether the method has an encoder that could be tabular, for an error.

        Raises InputError if there is nothing to learn from.
        """
        if settings.parts:
            parts = [
                (part_of(table, settings, name), own)
                for name, own in settings.parts.items()
                if own.columns != ()
            ]
            return cls._concat(
                [
                    cls.fit(
                        part,
                        train_rows,
                        one_hot=one_hot,
                        flatten=flatten,
                        settings=own,
                        tabular=tabular,
                    )
                    for part, own in parts
                ]
            )
        if len(train_rows) == 0:
            raise checks.unusable(
                table.source,
                "no training rows are left. Give more rows, or make the other splits smaller.",
            )
        values = _values(table)
        if values is None and table.categorical is None:
            raise checks.unusable(
                table.source,
                "has no features. Name some, or set features = false for the party.",
            )
        fill, shift, scale, ranks = None, np.zeros(0), np.zeros(0), None
        if values is not None:
            if settings.missing != "error":
                fill = fill_values(values, train_rows, settings.missing)
            filled = FilledValues(table, values, fill)
            shift, scale = scaling(filled, train_rows, settings.scale)
            if settings.scale == "quantile" and table.images_NCHW is not None:
                raise checks.unusable(
                    table.source, 'scale = "quantile" is for columns (got images). Use "minmax".'
                )
            if settings.scale == "quantile":
                ranks = tuple(map(tuple, quantiles(filled, train_rows).tolist()))
        vocabularies = []
        for k, name in enumerate(table.categorical_names):
            assert table.categorical is not None  # noqa: S101 - it has a name for each column
            times = count_words(table.categorical, k, train_rows)[:-1]
            seen = [
                word
                for word, count in zip(table.categorical.words[k], times.tolist(), strict=True)
                if count
            ]
            vocabularies.append(tuple(sorted(seen)))
            if one_hot and sum(map(len, vocabularies)) > MAX_ONE_HOT:
                raise checks.unusable(
                    table.source,
                    f"column {name!r} has too many categories for separate columns (got "
                    f'{len(seen)}). List it in data.drop, or use an encoder of kind "tabular".'
                    if tabular
                    else f"column {name!r} has too many categories for separate columns (got "
                    f"{len(seen)}). List it in data.drop.",
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
            quantiles=ranks,
        )

    @property
    def spec(self) -> InputSpec:
        """Shape and cardinalities of the rows that ``transform`` returns."""
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
        """Returns one preprocessor for the columns of all parts, which have no images."""

        def join(key: str) -> tuple[Any, ...]:
            return tuple(value for part in parts for value in getattr(part, key))

        # A part without fill is read only if none of its numbers is missing.
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
        """Returns encoder inputs of all rows of a table with the columns or image shape of
        training.

        Columns that training did not have are left out. Raises InputError if one is missing.
        """
        table = self._align(table)
        if table.images_NCHW is not None and is_whole(table.images_NCHW):
            return Features(self._scale_pixels(table.source, table.images_NCHW))
        values, words, space, n = _values(table), table.categorical, table.space, len(table)
        fill = None if self.fill is None else np.array(self.fill)
        filled = None if values is None else FilledValues(table, values, fill)
        places = (
            []
            if words is None
            else [_places(*pair) for pair in zip(words.words, self.vocabularies, strict=True)]
        )
        numbers = self.spec.shape
        x = space.empty((n, *numbers), np.float32)
        codes_NK = (
            space.empty((n, len(places)), np.int64)
            if words is not None and not self.one_hot
            else None
        )
        for part in parts_of(x):
            columns = [] if filled is None else [self._scale(table.source, filled[part])]
            if words is not None:
                codes_BK = np.stack(
                    [own[words.codes_NK[part, k]] for k, own in enumerate(places)], axis=1
                )
                if codes_NK is not None:
                    codes_NK[part] = codes_BK
                else:
                    columns.append(self._one_hot(codes_BK))
                release(words.codes_NK)
            if columns:
                x[part] = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
            release(x, *([] if codes_NK is None else [codes_NK]))
        cardinalities = (
            tuple(RESERVED + len(known) for known in self.vocabularies)
            if codes_NK is not None
            else ()
        )
        return Features.of(x, codes_NK, cardinalities, self._places())

    def _places(self) -> dict[str, ColumnPlace]:
        """Returns the position of each column of a table in the result of ``transform``."""
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
        categories, int64 [N, K], and all names.

        Pixels are numbers without names in the table. Raises InputError if a column of
        training is missing.
        """
        table = self._align(table)
        values, words, n = _values(table), table.categorical, len(table)
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
            codes_NK[:, k] = _places(words.words[k], vocabulary)[words.codes_NK[:, k]]
        names = self.numeric_names or tuple(
            f"pixel {place}" for place in range(numbers_NF.shape[1])
        )
        return numbers_NF, codes_NK, (*names, *self.categorical_names)

    def unseen(self, table: Table) -> dict[str, int]:
        """Returns {column: rows with categories that training did not have}. Raises InputError."""
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
        """Returns {column: numbers outside the range of training}; {} if training noted no ranges.
        Raises InputError.
        """
        values = self._align(table).numeric_NF
        if values is None or not self.spans:
            return {}
        counts = count_outside(values, self.spans).tolist()
        return {
            name: count for name, count in zip(self.numeric_names, counts, strict=True) if count
        }

    def state(self) -> dict[str, Any]:
        """Returns all that ``transform`` needs, for JSON."""
        return {member.name: getattr(self, member.name) for member in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Preprocessor:
        """Restores the object from ``state``, which may have passed through JSON."""
        return cls(**{key: _tuples(value) for key, value in state.items()})

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
                        f"column {name!r} held {kind} in training but does not now. Correct it.",
                    )
                near = checks.suggest_names(name, [*table.numeric_names, *table.categorical_names])
                raise checks.unusable(
                    table.source,
                    f"has no column {name!r}, but training had it{near}. Add the column.",
                )
        if self.kinds is not None:
            _check_kinds(table.source, self.numeric_names, self.kinds, table.kinds)
        return Table(
            table.source,
            table.ids,
            numeric_NF=_pick(table.numeric_NF, table.numeric_names, self.numeric_names),
            numeric_names=self.numeric_names,
            categorical=_pick_words(table, self.categorical_names),
            categorical_names=self.categorical_names,
            images_NCHW=table.images_NCHW,
            space=table.space,
        )

    def _scale(self, source: str, values_B: Floats) -> Floats:
        shape = (1, -1, *(1 for _ in values_B.shape[2:]))
        shift, scale = np.array(self.shift).reshape(shape), np.array(self.scale).reshape(shape)
        with np.errstate(over="ignore"):
            scaled_B = (values_B - shift) / scale
            for column, own in enumerate(self.quantiles or ()):
                if own:
                    scaled_B[:, column] = to_normal(
                        values_B[:, column].astype(np.float64), np.array(own)
                    )
            x_B: Floats = scaled_B.astype(np.float32)
        if not np.isfinite(x_B).all():
            raise checks.unusable(
                source, "has values too far from those of training to be scaled. Correct them."
            )
        return x_B.reshape(len(x_B), -1) if self.flatten else x_B

    def _scale_pixels(self, source: str, pixels: Pixels) -> ScaledPixels:
        """Returns images whose values are scaled on demand, as ``_scale`` does."""
        values_V = np.arange(np.iinfo(pixels.dtype).max + 1).astype(pixels.dtype)
        shape = (len(values_V), pixels.shape[1], 1, 1)
        x_VC = self._scale(source, np.broadcast_to(to_unit(values_V).reshape(-1, 1, 1, 1), shape))
        inputs_CV = np.ascontiguousarray(x_VC.reshape(shape[:2]).T)
        return ScaledPixels(pixels, inputs_CV, flatten=self.flatten)

    def _one_hot(self, codes_NK: Codes) -> Floats:
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
    """Raises InputError if a numeric column holds days, percentages or the like in only one of two
    tables.
    """
    for name in names:
        was, is_ = (_KINDS.get(kinds.get(name, ""), kinds.get(name, "")) for kinds in (before, now))
        if was != is_:
            raise checks.unusable(
                source,
                f"column {name!r} held {was} in training and holds {is_} now. Write it as in "
                "training.",
            )


def _values(table: Table) -> Pixels | None:
    return table.numeric_NF if table.images_NCHW is None else table.images_NCHW


def _places(words: tuple[str, ...], vocabulary: tuple[str, ...]) -> Codes:
    """Returns the code of each word, then the code of a missing one; see ``Features``."""
    known = {word: RESERVED + place for place, word in enumerate(vocabulary)}
    return np.array([*(known.get(word, UNKNOWN) for word in words), MISSING], np.int64)


def _pick_words(table: Table, ours: tuple[str, ...]) -> Categories | None:
    if table.categorical is None or not ours:
        return None
    theirs = table.categorical_names
    return (
        table.categorical
        if ours == theirs
        else table.categorical.select([theirs.index(name) for name in ours])
    )


def _pick(
    values: npt.NDArray[Any] | None, theirs: tuple[str, ...], ours: tuple[str, ...]
) -> npt.NDArray[Any] | None:
    if values is None or not ours:
        return None
    return values if ours == theirs else values[:, [theirs.index(name) for name in ours]]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
