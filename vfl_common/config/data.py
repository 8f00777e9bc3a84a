"""Settings of a party's own data: its source, its columns and how they are prepared."""

from __future__ import annotations

from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from vfl_common.config.base import Section, match_pattern

# Callers import these names from this module.
from vfl_common.config.sources import FRAME as FRAME
from vfl_common.config.sources import IMAGES as IMAGES
from vfl_common.config.sources import (
    SETS,
    URL,
    Format,
    get_format,
    resolve_source,
)
from vfl_common.config.sources import TEXT_FILES as TEXT_FILES
from vfl_common.config.sources import get_reader as get_reader
from vfl_common.config.sources import is_database as is_database
from vfl_common.config.sources import is_excel as is_excel
from vfl_common.config.sources import is_path as is_path
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords


class ViewSettings(Section):
    """The part of a data set that this party holds, for experiments in which one file holds the
    data of all parties. An ``mlp`` encoder gets its part of an image flattened.
    """

    scheme: Literal["columns", "quadrants", "halves", "rows"]
    """How the source is divided: ``columns`` (contiguous blocks of columns, as equal as possible),
    ``quadrants`` (quarters of an image: top left, top right, bottom left, bottom right), ``halves``
    (left and right half of an image), ``rows`` (every ``parts``-th row, with all columns).
    """
    part: NonNegativeInt
    """The number of this party's part, from 0."""
    parts: PositiveInt
    """The number of parts; 4 for ``quadrants``, 2 for ``halves``."""

    def model_post_init(self, _context: Any) -> None:
        if self.scheme == "quadrants" and self.parts != 4:
            raise ValueError("scheme = 'quadrants' needs parts = 4. Correct parts.")
        if self.scheme == "halves" and self.parts != 2:
            raise ValueError("scheme = 'halves' needs parts = 2. Correct parts.")
        if self.part >= self.parts:
            raise ValueError(
                f"part must be from 0 to {self.parts - 1} (got {self.part}). Correct it."
            )


# A rule that normalises an id, so that all parties spell it the same; implemented in
# ``vfl_party.data.id_rules``.
IdRule = Annotated[
    str,
    match_pattern(
        r"trim|casefold|nfkc|digits|zeros|email|phone:[A-Z]{2}",
        "'trim', 'casefold', 'nfkc', 'digits', 'zeros', 'email' or 'phone:CC', with a "
        "country such as DE for CC",
    ),
]
Duplicates = Literal["error", "first", "drop"]
Unlabelled = Literal["refuse", "drop"]
# The maximum number of columns that a dense encoder can sensibly take as input.
MAX_COLUMNS = 1 << 16
# The number of hash buckets of a categorical column; above the limit, hashing no longer reduces the
# number of categories.
Buckets = Annotated[int, Field(ge=1, le=1 << 20)]
# The value of ``data.id`` that means the row's number, if no column has this name.
ROW = "row"


class KeyColumns(NamedTuple):
    """The key columns of a party.

    ``rules``: For each column of ``data.id``, the rules that normalise it. ``keys``: For each key,
    the positions of its columns in ``data.id``.
    """

    rules: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[int, ...], ...]


class MatchingSettings(Protocol):
    """The settings of a recipe about ids and keys; see ``RowsSettings``."""

    @property
    def matching_columns(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def key_rules(self) -> dict[str, tuple[str, ...]]: ...
    @property
    def id_rules(self) -> tuple[str, ...]: ...


def parse_id_columns(value: Any) -> Any:
    """Turns the setting ``id`` (one name, a list of names, or None) into a sequence of column
    names.
    """
    return () if value is None else (value,) if isinstance(value, str) else value


def _expand_size(value: Any) -> Any:
    """Turns one number into (height, width); leaves any other value unchanged."""
    return (value, value) if isinstance(value, int) else value


# The height or width of an image, in pixels. A larger number is a typing mistake.
Side = Annotated[int, Field(gt=0, le=16_384)]
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(_expand_size)]


class DataSettings(Section):
    """One party's data. The settings ``parts``, ``in_common``, ``as_trained``,
    ``key_places`` and ``column_rules`` are set by the program (baselines, predictions, recipes with
    keys), not by people.
    """

    source: str
    """Where the rows are: a file (``.csv``, ``.tsv``, ``.txt``, ``.libsvm``, ``.svm``,
    ``.svmlight``, ``.idx``, each also ``.gz`` or ``.bz2``; ``.parquet``, ``.xlsx``, ``.xlsm``,
    ``.npz``, ``.mat``), a member of a zip or tar file (``archive.zip/member.csv``), a folder of
    Parquet files or of images, the URL of a database, a query of DuckDB (``duckdb:SELECT …``),
    ``sklearn:NAME``, ``torchvision:NAME``, or ``NAME:REST`` for the plug-in NAME. Write
    ``./NAME:REST`` for a file whose name looks so.
    """
    format: Format | None = None
    """The file's format, if its name does not show it: ``text`` (separated cells), ``libsvm``
    (svmlight, too), ``idx`` (MNIST's), ``mat`` (MATLAB's, to version 7).
    """
    sheet: str | None = None
    """The sheet of an Excel workbook. Default: the only visible sheet with rows."""
    query: str | None = None
    """The SELECT whose rows are the table. A database needs it; other sources refuse it."""
    id: tuple[str, ...] = ()
    """The id column, or several columns that together form the id. Tables need it. Named sets and
    NPZ files use the row number if it is not given. ``row`` means the row number, if no column has
    this name; use it only if all parties have the same rows in the same order.
    """
    id_rules: tuple[IdRule, ...] | None = None
    """The rules that normalise this party's ids, in order, before ids are compared. Default:
    ``rows.id_rules`` of the recipe.
    """
    keys: dict[str, str] = Field(default_factory=dict)
    """With ``rows.keys`` or ``rows.fuzzy``: this party's column for a name in them, if it has
    another name.
    """
    key_rules: dict[str, tuple[IdRule, ...]] = Field(default_factory=dict)
    """With ``rows.keys`` or ``rows.fuzzy``: this party's rules for a name in them, in place of
    ``rows.key_rules``.
    """
    duplicates: Duplicates = "error"
    """What happens to rows that share an id: ``error`` refuses the table, ``first`` keeps the first
    row of the source, ``drop`` keeps no such row.
    """
    expect_common: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """With psi or fuzzy: the expected share of this party's rows that all parties hold. A smaller
    share gives a warning.
    """
    label: str | None = None
    """The label column. The active party needs it, except for named sets, whose label is
    ``target``. At a passive party, this column is removed from the features.
    """
    labels: tuple[str, ...] = ()
    """The label columns of a ``multilabel`` task, in place of ``label``: each holds 0 and 1, or
    true and false. Only for the active party.
    """
    weight: str | None = None
    """The active party's column with the weight of each row in the training loss: numbers of 0 or
    more, of which only the proportions matter. It is no feature. Only for the active party.
    """
    event: str | None = None
    """The event column of a ``survival`` task: 1 or true if the event happened at the time in
    ``label``, 0 or false if the row was censored at that time. Only for the active party.
    """
    group: str | None = None
    """The active party's column with the group of each row: the query in a ``ranking`` task, or the
    group that ``rows.split = "grouped"`` keeps in one split. It is no feature. Only for the active
    party.
    """
    unlabelled: Unlabelled = "refuse"
    """What happens to rows whose label is missing: ``refuse`` refuses the table, ``drop`` leaves
    them out of training. They can be predicted like all other rows.
    """
    split: str | None = None
    """The column with each row's split (``train``, ``validation``, ``test``), for ``rows.split =
    "column"``. It is no feature. The active party reads it; with ``rows.align = "none"`` every
    passive party does.
    """
    columns: tuple[str, ...] | None = None
    """The feature columns (NPZ: arrays). Default: all but ids, the columns above and ``drop``."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    numeric: tuple[str, ...] = ()
    """Columns that must be numbers. The types of the other columns are detected."""
    categorical: tuple[str, ...] = ()
    """Columns that are categories even if they hold numbers."""
    categorical_buckets: Buckets | dict[str, Buckets] | None = None
    """The number of buckets into which the values of categorical columns are hashed, so that a
    column may have any number of values: one number for all columns, or a table {column: number}.
    Values in the same bucket become one category.
    """
    missing: Literal["error", "mean", "median", "zero"] = "error"
    """How missing numbers are handled: refused (``error``), or replaced with the mean or median of
    this party's training rows or with zero. A missing category becomes a category of its own.
    """
    na: tuple[str, ...] = ()
    """Texts that mean an empty cell, such as ``unknown``, in every column. Case matters; white
    space at the ends does not.
    """
    scale: Literal["standard", "minmax", "quantile", "none"] = "standard"
    """How numeric columns are scaled by this party's training rows: mean 0 and deviation 1
    (``standard``), 0 to 1 (``minmax``), by rank to a normal distribution (``quantile``, not for
    images), or not at all.
    """
    label_scale: Literal["standard", "minmax"] = "standard"
    """How a regression's labels are scaled by the training rows: mean 0 and deviation 1
    (``standard``), or 0 to 1 (``minmax``).
    """
    image_shape: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field()] | None = None
    """Channels, height and width, if a row of numbers is an image."""
    resize: ImageSize | None = None
    """The height and width to which images are resized, or one number for both. Then the images of
    a folder may differ in size. Default: images keep their size.
    """
    channels: Literal[1, 3] | None = None
    """The number of channels to which images are converted: 1 (grey) or 3 (colour). Default: images
    keep their channels, which must be the same for all.
    """
    download: bool = False
    """Whether torchvision may download a data set that is not in ``download_dir``."""
    download_dir: str = "data"
    """The folder with torchvision's data sets."""
    view: ViewSettings | None = None
    """The part of the source that this party holds, for experiments in which one file holds the
    data of all parties.
    """
    names: tuple[str, ...] | Annotated[int, Field(ge=1, le=MAX_COLUMNS)] | None = None
    """The column names of a text file without a header line, or the number of its columns, which
    are then called ``f1``, ``f2`` and so on. For a libsvm file, the label is not counted. Default:
    the first line is the header; a libsvm file has as many columns as its largest index.
    """
    separator: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    """The character between the cells of a text file, or several, such as ``::``, or ``whitespace``
    for runs of spaces and tabs. Default: detected, if it is one character.
    """
    decimal: Literal[".", ","] | None = None
    """The decimal point of numbers that are written as text. Default: detected."""
    thousands: Literal["", ".", ",", " ", "'"] | None = None
    """The thousands sign of numbers that are written as text; ``""`` for none. Default: detected.
    """
    encoding: str | None = None
    """The encoding of a text file, such as ``cp1252``. Default: detected (UTF-8 or Windows-1252).
    """
    skip_lines: NonNegativeInt = 0
    """The number of lines of a text file, or rows of a sheet, to skip before the line with the
    column names.
    """
    dates: str | dict[str, str] | None = None
    """The format of dates that are written as text, as in ``strptime``, such as ``%d/%m/%Y``; or a
    table {column: format}. Default: detected, if only one format fits a column.
    """
    memory_mib: NonNegativeInt = 256
    """The largest array of rows that is kept in memory, in MiB. A larger array is kept in a file in
    ``scratch``.
    """
    scratch: str | None = None
    """The folder for arrays that are larger than ``memory_mib``. Default: the party's ``out``."""
    unaligned: str | None = None
    """A source of the same kind with more rows, without labels, that only this party has. Local
    self-supervised learning uses them.
    """
    limit: PositiveInt | None = None
    """The maximum number of rows of the source that are used. Default: all."""
    limit_by: Literal["first", "random"] = "first"
    """Which rows ``limit`` takes: ``first``, the first rows of the source; or ``random``, rows that
    are chosen by the digests of their ids, so that parties with the same ids choose the same rows
    in every run. With ``rows.keys`` or ``rows.fuzzy``, the digest is of the first key or field that
    a row has.
    """
    parts: dict[str, DataSettings] = Field(default_factory=dict)
    """Set by baselines: each party's data, joined by id. Each part is read by its own settings, and
    the first has the label.
    """
    in_common: bool = False
    """Set by baselines: whether rows that not all parts hold are left out."""
    as_trained: bool = False
    """Set by a prediction: whether columns and their types must be the same as in the trained run.
    """
    key_places: tuple[tuple[int, ...], ...] = ()
    """Set with ``rows.keys``: for each key, the positions of its columns in ``id``, from 0."""
    column_rules: tuple[tuple[IdRule, ...], ...] = ()
    """Set with ``rows.keys``: for each column of ``id``, the rules that normalise it."""
    _like: tuple[str, str] | None = PrivateAttr(default=None)
    _keeps_rows: bool = PrivateAttr(default=False)
    _spelt_by_recipe: bool = PrivateAttr(default=False)

    @property
    def like(self) -> tuple[str, str] | None:
        """The decimal point and the thousands sign of the training table, for a table of rows to
        predict; else None.
        """
        return self._like

    def copy_layout_of(self, style: tuple[str, str] | None) -> DataSettings:
        """Returns a copy of the settings that reads ambiguous numbers in the style of the training
        table: its decimal point and thousands sign.
        """
        settings = self.model_copy()
        settings._like = style
        return settings

    @property
    def keeps_rows(self) -> bool:
        """Whether the table remembers the source's rows and the original spelling of their ids,
        which result files need.
        """
        return self._keeps_rows

    def keeping_rows(self) -> DataSettings:
        """Returns a copy of the settings with ``keeps_rows`` set; with ``parts``, it is set for the
        first part.
        """
        name = next(iter(self.parts), "")
        parts = {name: self.parts[name].keeping_rows()} if name else {}
        settings = self.model_copy(update={"parts": self.parts | parts})
        settings._keeps_rows = True
        return settings

    @field_validator("source", "unaligned")
    @classmethod
    def _lower_scheme(cls, value: str | None) -> str | None:
        url = URL.match(value or "")
        return value if value is None or url is None else url[0].lower() + value[url.end() :]

    @field_validator("id", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        columns = parse_id_columns(value)
        if not isinstance(columns, list | tuple):
            raise ValueError("must be the name of a column or a list of names")
        return columns

    def model_post_init(self, _context: Any) -> None:
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError("decimal and thousands must be different characters. Change one.")
        text_only = [key for key in ("separator", "encoding", "names") if getattr(self, key)]
        if text_only and is_excel(self.source):
            raise ValueError(
                f"{text_only[0]} is for text files, and {hide_passwords(self.source)} is a "
                "workbook. Remove it."
            )
        if self.names is not None and self.kind not in ("text", "libsvm"):
            raise ValueError(
                "names is for text and libsvm files. Remove it, or say what the file is with "
                "format."
            )
        if self.format is not None and not is_path(self.source):
            raise ValueError(
                f"format is for files, and {hide_passwords(self.source)} is not a file. Remove it."
            )
        if self.limit_by == "random" and self.limit is None:
            raise ValueError("limit_by needs limit. Add limit, or remove limit_by.")
        if len(self.labels) == 1:
            raise ValueError("labels must name at least 2 columns (got 1). Use label instead.")
        if self.labels and self.event is not None:
            raise ValueError("event is for a survival task, which has one label. Remove it.")
        if self.labels and self.label not in (None, self.labels[0]):
            raise ValueError("label and labels are both set. Remove label.")
        roles = [name for name in (*self.id, *self.roles) if name is not None]
        if len(set(roles)) < len(roles):
            raise ValueError(
                "id, label, event, group, weight and split must be different columns (two of "
                "them have the same name). Change one."
            )
        if self.query is not None and not self.is_database:
            raise ValueError(
                "query is for a database. Remove it, or give a source such as "
                "postgresql://USER@HOST/NAME."
            )
        if self.sheet is not None and not is_excel(self.source):
            raise ValueError(
                "sheet is for an Excel workbook. Remove it, or give a source that ends in "
                ".xlsx or .xlsm."
            )

    @model_validator(mode="before")
    @classmethod
    def _first_label(cls, value: Any) -> Any:
        """Sets ``label`` to the first of ``labels``."""
        labels = value.get("labels") if isinstance(value, dict) else None
        if isinstance(labels, list | tuple) and labels and value.get("label") is None:
            return {**value, "label": labels[0]}
        return value

    @property
    def kind(self) -> Format | None:
        """The format of the source's file, from ``format`` or else from its name; None if the
        source is not a file.
        """
        return self.format or (get_format(self.source) if is_path(self.source) else None)

    @property
    def first(self) -> int | None:
        """How many of the source's first rows are read; None: all."""
        return self.limit if self.limit_by == "first" else None

    def buckets(self, name: str) -> int | None:
        """Returns the number of buckets into which a column's categories are hashed; None if they
        are not hashed.
        """
        buckets_ = self.categorical_buckets
        return buckets_.get(name) if isinstance(buckets_, dict) else buckets_

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that the active party reads besides its label and features: further labels,
        event, group and weight.
        """
        columns = (role for role in (self.event, self.group, self.weight) if role is not None)
        return (*self.labels[1:], *columns)

    def role_beside(self, name: str) -> str:
        """Returns the role of one of the columns ``beside``: ``event``, ``group``, ``weight`` or
        ``label``.
        """
        role_of = {getattr(self, key): key for key in ("event", "group", "weight")}
        return role_of.get(name, "label")

    @property
    def roles(self) -> tuple[str | None, ...]:
        """The columns that are neither ids nor features; None for a column that is not set."""
        return (self.label, *self.beside, self.split)

    def date_form(self, name: str) -> str | None:
        """Returns the date format that ``dates`` gives for a column; None if the format must be
        detected.
        """
        return self.dates.get(name) if isinstance(self.dates, dict) else self.dates

    @property
    def is_table(self) -> bool:
        """Whether the source is a table: a table file, a database, a table in memory or a plug-in's
        source.
        """
        if is_path(self.source):
            arrays = self.kind in ("idx", "mat") or self.source.lower().endswith(".npz")
            return not arrays and not _has_images(self.source)
        return not self.is_named

    @property
    def is_database(self) -> bool:
        """Whether the source is the URL of a database: a known one, or any URL if ``query`` is
        set.
        """
        return is_database(self.source) or (
            self.query is not None and URL.match(self.source) is not None
        )

    def absolute(self, base: Path) -> DataSettings:
        """Returns a copy of the settings in which relative paths start at ``base`` and are
        absolute.
        """
        if self.parts:
            return self.model_copy(
                update={"parts": {name: part.absolute(base) for name, part in self.parts.items()}}
            )
        paths = {
            "source": resolve_source(self.source, base),
            "download_dir": normpath(base / self.download_dir),
        }
        if self.unaligned is not None:
            paths["unaligned"] = resolve_source(self.unaligned, base)
        if self.scratch is not None:
            paths["scratch"] = normpath(base / self.scratch)
        return self.model_copy(update=paths)

    def with_id_rules(self, rows: MatchingSettings) -> DataSettings:
        """Returns a copy of the settings with the rules for ids and the keys of a recipe, unless
        the party has its own rules.

        Raises InputError if ``id`` lacks a column of a key, or if a column has two names.
        """
        id_rules = rows.id_rules if self.id_rules is None else self.id_rules
        if self.parts:
            parts = {name: part.with_id_rules(rows) for name, part in self.parts.items()}
            settings = self.model_copy(update={"parts": parts, "id_rules": id_rules})
            settings._spelt_by_recipe = any(part.spelt_by_recipe for part in parts.values())
            return settings
        settings = self.model_copy(update={"id_rules": id_rules})
        settings._spelt_by_recipe = self.id_rules is None and bool(rows.id_rules)
        names = list(dict.fromkeys(name for key in rows.matching_columns for name in key))
        if not names:
            return settings
        columns = {name: self.keys.get(name, name) for name in names}
        absent = next((column for column in columns.values() if column not in self.id), None)
        if absent is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"data.id: must have all columns of rows.keys or rows.fuzzy (lacks {absent}). Add "
                "it, or give this party's name of the column in data.keys.",
            )
        if len({*columns.values()}) < len(columns):
            raise InputError(
                Code.CONFIG_INVALID,
                "data.keys: each name needs another column (got "
                f"{', '.join(columns.values())}). Correct it.",
            )
        rules = dict.fromkeys(self.id, self.id_rules or ())
        for name, column in columns.items():
            by_recipe = rows.key_rules.get(name, id_rules)
            rules[column] = self.key_rules.get(name, by_recipe)
        places = [[self.id.index(columns[name]) for name in key] for key in rows.matching_columns]
        update = {
            "key_places": tuple(map(tuple, places)),
            "column_rules": tuple(rules.values()),
        }
        settings = settings.model_copy(update=update)
        # The noise of a label and the account of people need an id that no recipe can change.
        settings._spelt_by_recipe = set(rules.values()) != {self.id_rules or ()}
        return settings

    @property
    def key_columns(self) -> KeyColumns | None:
        """The columns of the recipe's keys; None if the recipe has no keys."""
        return KeyColumns(self.column_rules, self.key_places) if self.key_places else None

    @property
    def spelt_by_recipe(self) -> bool:
        """Whether the recipe's rules change the ids, because the party has no rules of its own."""
        return self._spelt_by_recipe

    def with_missing(self) -> DataSettings:
        """Returns a copy of the settings for a method that handles missing numbers itself:
        ``missing`` no longer defaults to ``error``.
        """
        parts = {name: part.with_missing() for name, part in self.parts.items()}
        missing = self.missing if "missing" in self.model_fields_set else "mean"
        return self.model_copy(update={"parts": parts, "missing": missing})

    @property
    def is_named(self) -> bool:
        """Whether the source is a data set of scikit-learn or torchvision. Its label is always
        ``target``.
        """
        return get_reader(self.source) in SETS


def _has_images(source: str) -> bool:
    try:
        return (Path(source) / IMAGES).is_file()
    except OSError:
        # The name is too long, or the folder is not readable. The reader reports that later.
        return False


# An update of DataSettings with which only the ids of rows are read.
NO_FEATURES: dict[str, Any] = {
    **dict.fromkeys(("columns", "drop", "numeric", "categorical"), ()),
    **dict.fromkeys(("image_shape", "resize", "channels")),
}


def without_features(settings: DataSettings) -> DataSettings:
    """Returns a copy of the settings without features, for an active party that holds only
    labels.
    """
    if settings.is_named:
        return settings
    return settings.model_copy(update=NO_FEATURES)


def get_unaligned_settings(settings: DataSettings) -> DataSettings | None:
    """Returns a copy of the settings with ``unaligned`` as the source; None if ``unaligned`` is not
    set.
    """
    if settings.unaligned is None:
        return None
    cleared = dict.fromkeys(("unaligned", "label", "split", "limit"))
    update = {**cleared, "limit_by": "first", "source": settings.unaligned}
    return settings.model_copy(update=update)
