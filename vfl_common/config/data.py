"""Settings of a party's own data: where it lies, which columns it has, and how they are
prepared.
"""

from __future__ import annotations

from os.path import normpath
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    field_validator,
    model_validator,
)

from vfl_common.config.base import Section, has_form

# For those who have a source.
from vfl_common.config.sources import FRAME as FRAME
from vfl_common.config.sources import IMAGES as IMAGES
from vfl_common.config.sources import (
    SETS,
    URL,
    Format,
    format_of,
    resolve_source,
)
from vfl_common.config.sources import TEXT_FILES as TEXT_FILES
from vfl_common.config.sources import is_database as is_database
from vfl_common.config.sources import is_excel as is_excel
from vfl_common.config.sources import is_path as is_path
from vfl_common.config.sources import reader_of as reader_of
from vfl_common.config.view import ViewSettings as ViewSettings
from vfl_common.passwords import hide_passwords

# A step that spells an id as the other parties do; ``vfl_party.data.ids.spelling`` has them.
IdRule = Annotated[
    str,
    has_form(
        r"trim|casefold|nfkc|digits|zeros|email|phone:[A-Z]{2}",
        "'trim', 'casefold', 'nfkc', 'digits', 'zeros', 'email' or 'phone:CC', with a "
        "country such as DE for CC",
    ),
]
Duplicates = Literal["error", "first", "drop"]
Unlabelled = Literal["refuse", "drop"]
# More make no sensible input of a dense encoder.
MAX_COLUMNS = 1 << 16
# More are no help against many categories: a column of text may have as many values.
Buckets = Annotated[int, Field(ge=1, le=1 << 20)]
# As ``data.id``: the row's number, if no column has this name.
ROW = "row"


def id_columns(value: Any) -> Any:
    """Returns the columns of an id as people write them: one name, a list of names, or None."""
    return () if value is None else (value,) if isinstance(value, str) else value


def _both(value: Any) -> Any:
    """Returns height and width, if one number is given for both."""
    return (value, value) if isinstance(value, int) else value


# In pixels; more is a typing mistake.
Side = Annotated[int, Field(gt=0, le=16_384)]
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(_both)]


class DataSettings(Section):
    """One party's data. ``vfl.simulation.baselines`` and predictions make settings that no person
    writes: ``parts``, ``in_common``, ``as_trained``.
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
    """What the file is, if its name does not say: ``text`` (separated cells), ``libsvm`` (svmlight,
    too), ``idx`` (MNIST's), ``mat`` (MATLAB's, to version 7).
    """
    sheet: str | None = None
    """The sheet of an Excel workbook. Default: the only visible sheet with rows."""
    query: str | None = None
    """The SELECT whose rows are the table. A database needs it; other sources refuse it."""
    id: tuple[str, ...] = ()
    """The id column, or several columns that are one id together. Tables need it; named sets and
    NPZ without it take the row's number. ``row``, if no column is called so, is the row's number in
    every source: it aligns only tables whose rows are the same, in the same order.
    """
    id_rules: tuple[IdRule, ...] | None = None
    """How this party spells its ids alike, in order, before they are compared. Default:
    ``rows.id_rules`` of the recipe.
    """
    duplicates: Duplicates = "error"
    """What happens to rows that share an id: ``error`` refuses the table, ``first`` keeps the first
    row of the source, ``drop`` keeps no such row.
    """
    expect_common: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """With psi: the share of this party's rows that should be common to all. With less the party
    gets a warning.
    """
    label: str | None = None
    """The label column. The active party needs it, except for named sets, whose label is
    ``target``. At a passive party it takes the column out of the features.
    """
    labels: tuple[str, ...] = ()
    """The label columns of a ``multilabel`` task, in place of ``label``: each holds 0 and 1, or
    true and false. Only for the active party.
    """
    weight: str | None = None
    """The active party's column of how much each row counts in the loss of training: numbers of 0
    or more, of which only the proportions matter. It is no feature. Only for the active party.
    """
    event: str | None = None
    """Of a ``survival`` task: the column that says whether ``label`` is the time at which it
    happened (1 or true), or until which it had not (0 or false). Only for the active party.
    """
    group: str | None = None
    """The active party's column of what belongs together: the query of each row of a ``ranking``
    task, or what ``rows.split = "grouped"`` keeps in one split. It is no feature. Only for the
    active party.
    """
    unlabelled: Unlabelled = "refuse"
    """What happens to rows whose label is missing: ``refuse`` refuses the table, ``drop`` leaves
    them out of training. They can be predicted as all others.
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
    """Columns that must be numbers. The type of the others is found."""
    categorical: tuple[str, ...] = ()
    """Columns that are categories even if they hold numbers."""
    categorical_buckets: Buckets | dict[str, Buckets] | None = None
    """Into how many buckets the values of categorical columns are hashed, so that a column may have
    any number of values: one number for all, or a table {column: number}. Values of one bucket are
    one category.
    """
    missing: Literal["error", "mean", "median", "zero"] = "error"
    """What a missing number becomes: an error, the mean or median of this party's training rows, or
    zero. A missing category is a category.
    """
    na: tuple[str, ...] = ()
    """Texts that mean an empty cell, such as ``unknown``, in every column. Capitals count; white
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
    """Height and width to which images are brought, or one number for both. Images of one folder
    may then have several sizes. Default: as they are.
    """
    channels: Literal[1, 3] | None = None
    """What images become: grey (1) or coloured (3). Default: as they are, and all alike."""
    download: bool = False
    """Whether torchvision may fetch a set that is not in ``download_dir``."""
    download_dir: str = "data"
    """The folder of torchvision's sets."""
    view: ViewSettings | None = None
    """The part of the source that this party holds, for experiments in which one file has all
    parts.
    """
    names: tuple[str, ...] | Annotated[int, Field(ge=1, le=MAX_COLUMNS)] | None = None
    """The columns' names of a text file without a line that names them, or how many columns it has:
    they are then ``f1``, ``f2`` and so on. Of a libsvm file: of the columns beside the label.
    Default: the first line names them; libsvm: as many as the largest index.
    """
    separator: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    """The character between the cells of a text file, or several, such as ``::``, or
    ``whitespace`` for runs of spaces and tabs. Default: found, if it is one character.
    """
    decimal: Literal[".", ","] | None = None
    """The decimal point of numbers that are written as text. Default: found."""
    thousands: Literal["", ".", ",", " ", "'"] | None = None
    """The thousands sign of numbers that are written as text; ``""`` for none. Default: found."""
    encoding: str | None = None
    """The encoding of a text file, such as ``cp1252``. Default: found, UTF-8 or Windows-1252."""
    skip_lines: NonNegativeInt = 0
    """Lines of a text file, or rows of a sheet, before the line with the columns' names."""
    dates: str | dict[str, str] | None = None
    """The form of dates that are written as text, in the notation of ``strptime``, such as
    ``%d/%m/%Y``; or a table with the form of each column that needs it. Default: found, if only one
    form fits a column.
    """
    memory_mib: NonNegativeInt = 256
    """The largest array of rows that stays in memory, in MiB. A larger array lies in a file in
    ``scratch``.
    """
    scratch: str | None = None
    """The folder of arrays that are larger than ``memory_mib``. Default: the party's ``out``."""
    unaligned: str | None = None
    """A source of the same kind with more rows, without labels, that only this party has. Local
    self-supervised learning uses them.
    """
    limit: PositiveInt | None = None
    """How many of the source's rows are used. Default: all."""
    limit_by: Literal["first", "random"] = "first"
    """Which rows ``limit`` takes: the source's first ones, or some at random, which the digests of
    their ids choose: parties that hold the same ids take the same ones, in every run.
    """
    parts: dict[str, DataSettings] = Field(default_factory=dict)
    """Set by baselines: each party's data, joined by id. Each part is read by its own settings, and
    the first has the label.
    """
    in_common: bool = False
    """Set by baselines: whether rows that not all parts hold are left out."""
    as_trained: bool = False
    """Set by a prediction: whether columns and their kinds must be those of the trained run."""
    _like: tuple[str, str] | None = PrivateAttr(default=None)
    _keeps_rows: bool = PrivateAttr(default=False)
    _spelt_by_recipe: bool = PrivateAttr(default=False)

    @property
    def like(self) -> tuple[str, str] | None:
        """The decimal point and the thousands sign of the table of training, for rows to predict;
        else None.
        """
        return self._like

    def copy_layout_of(self, style: tuple[str, str] | None) -> DataSettings:
        """Returns the same settings for a table that is written as that of training, if it can be
        read in two ways.
        """
        settings = self.model_copy()
        settings._like = style
        return settings

    @property
    def keeps_rows(self) -> bool:
        """Whether the table keeps which rows the source has, and how it spells their ids: for
        results.
        """
        return self._keeps_rows

    def keeping_rows(self) -> DataSettings:
        """Returns the same settings for a table that keeps its source's rows; of ``parts``, the
        first one does.
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
        columns = id_columns(value)
        if not isinstance(columns, list | tuple):
            raise ValueError("must be the name of a column, or a list of names")
        return columns

    def model_post_init(self, _context: Any) -> None:
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError("decimal and thousands are two signs; both are the same here")
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
                f"format is for files, and {hide_passwords(self.source)} is none. Remove it."
            )
        if self.limit_by == "random" and self.limit is None:
            raise ValueError("limit_by chooses among rows. Set limit, too, or remove it.")
        if len(self.labels) == 1:
            raise ValueError("labels names two columns or more; for one, give label")
        if self.labels and self.event is not None:
            raise ValueError("event is for a survival task, which has one label. Remove it.")
        if self.labels and self.label not in (None, self.labels[0]):
            raise ValueError("give label or labels, and not both")
        roles = [name for name in (*self.id, *self.roles) if name is not None]
        if len(set(roles)) < len(roles):
            raise ValueError(
                "id, label, event, group, weight and split are columns of their own; two of them "
                "have the same name"
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
        """Makes the first of ``labels`` the label, too."""
        labels = value.get("labels") if isinstance(value, dict) else None
        if isinstance(labels, list | tuple) and labels and value.get("label") is None:
            return {**value, "label": labels[0]}
        return value

    @property
    def kind(self) -> Format | None:
        """What the source's file is: by ``format``, else by its name; None of all other sources."""
        return self.format or (format_of(self.source) if is_path(self.source) else None)

    @property
    def first(self) -> int | None:
        """How many of the source's first rows are read; None: all."""
        return self.limit if self.limit_by == "first" else None

    def buckets(self, name: str) -> int | None:
        """Returns into how many buckets a column's categories are hashed; None: they are not."""
        buckets_ = self.categorical_buckets
        return buckets_.get(name) if isinstance(buckets_, dict) else buckets_

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that the active party reads beside its label."""
        others = (role for role in (self.event, self.group, self.weight) if role is not None)
        return (*self.labels[1:], *others)

    def role_beside(self, name: str) -> str:
        """Returns what one of ``beside`` is: ``event``, ``group`` or ``weight``, or else a
        ``label``.
        """
        named = {getattr(self, key): key for key in ("event", "group", "weight")}
        return named.get(name, "label")

    @property
    def roles(self) -> tuple[str | None, ...]:
        """The columns that are neither ids nor features; None for one that is not given."""
        return (self.label, *self.beside, self.split)

    def date_form(self, name: str) -> str | None:
        """Returns the form that ``dates`` gives for a column; None if it is to be found."""
        return self.dates.get(name) if isinstance(self.dates, dict) else self.dates

    @property
    def is_table(self) -> bool:
        """Whether the source is a file of a table, a database, a table in memory, or what a plug-in
        reads.
        """
        if is_path(self.source):
            arrays = self.kind in ("idx", "mat") or self.source.lower().endswith(".npz")
            return not arrays and not _has_images(self.source)
        return not self.is_named

    @property
    def is_database(self) -> bool:
        """Whether the source is the URL of a database: of a known one, or of any if there is a
        query.
        """
        return is_database(self.source) or (
            self.query is not None and URL.match(self.source) is not None
        )

    def absolute(self, base: Path) -> DataSettings:
        """Returns the same settings, with relative paths taken from ``base``."""
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

    def with_id_rules(self, rules: tuple[str, ...]) -> DataSettings:
        """Returns the same settings with the recipe's rules for ids, unless they have their own."""
        parts = {name: part.with_id_rules(rules) for name, part in self.parts.items()}
        own = rules if self.id_rules is None else self.id_rules
        settings = self.model_copy(update={"parts": parts, "id_rules": own})
        settings._spelt_by_recipe = (
            any(part.spelt_by_recipe for part in parts.values())
            if parts
            else self.id_rules is None and bool(rules)
        )
        return settings

    @property
    def spelt_by_recipe(self) -> bool:
        """Whether rules of the recipe change the ids, and none of the party's own."""
        return self._spelt_by_recipe

    def with_missing(self) -> DataSettings:
        """Returns the same settings for a method that takes missing numbers as they are, unless
        they refuse them.
        """
        parts = {name: part.with_missing() for name, part in self.parts.items()}
        missing = self.missing if "missing" in self.model_fields_set else "mean"
        return self.model_copy(update={"parts": parts, "missing": missing})

    @property
    def is_named(self) -> bool:
        """Whether the source is one of scikit-learn's or torchvision's sets, whose label is always
        ``target``.
        """
        return reader_of(self.source) in SETS


def _has_images(source: str) -> bool:
    try:
        return (Path(source) / IMAGES).is_file()
    except OSError:
        # A name that is too long, a folder that may not be looked into: told when it is read.
        return False


# Changes of settings with which any rows are read as ids only.
NO_FEATURES: dict[str, Any] = {
    **dict.fromkeys(("columns", "drop", "numeric", "categorical"), ()),
    **dict.fromkeys(("image_shape", "resize", "channels")),
}


def ids_only(settings: DataSettings) -> DataSettings:
    """Returns the same data without features, for an active party that holds only labels."""
    if settings.is_named:
        return settings
    return settings.model_copy(update=NO_FEATURES)


def get_unaligned_settings(settings: DataSettings) -> DataSettings | None:
    """Returns the same settings with ``unaligned`` as source; None if that is not set."""
    if settings.unaligned is None:
        return None
    without = dict.fromkeys(("unaligned", "label", "split", "limit"))
    update = {**without, "limit_by": "first", "source": settings.unaligned}
    return settings.model_copy(update=update)
