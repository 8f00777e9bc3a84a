"""Opens the feature store of a party file."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import DatabaseStore, ServiceStore, is_database
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords
from vfl_party.assembly.files import PartyFiles
from vfl_party.base.phase import Tree
from vfl_party.base.seeds import Rows
from vfl_party.data import Preprocessor, Table, checks
from vfl_party.data.id_rules import normalize_ids
from vfl_party.data.load import tabulate
from vfl_party.data.reading import collect, id_texts
from vfl_party.data.stream import RowStream, strip_mark
from vfl_party.data.table import Categories
from vfl_party.phases.course import Course
from vfl_party.predict.run import TrainedRun, prediction_data
from vfl_serve.stores.alchemy import AlchemyRows
from vfl_serve.stores.postgres import PostgresRows
from vfl_serve.stores.seam import (
    UNFIT_ROW,
    UNKNOWN_ROW,
    IdBatch,
    LookupResult,
    Source,
    ValueMismatchError,
    split_until_fit,
)
from vfl_serve.stores.service import ServiceRows

_POSTGRES = ("postgresql://", "postgres://")
# Settings that apply to training or to files only.
_NOT_HERE: dict[str, Any] = dict.fromkeys(
    ("label", "event", "group", "weight", "split", "limit", "sheet", "names", "format", "unaligned")
)


def open_store(
    files: PartyFiles,
    trained: TrainedRun,
    store: DatabaseStore | ServiceStore,
    advise: Callable[[str], None],
) -> ByIds:
    """Opens a database or a service and tests it with a query without ids.

    ``advise``: shows a sentence to this party's operator. Raises InputError if the columns of
    training are not available.
    """
    settings, preprocessor = (
        make_store_settings(files, trained.state, store),
        _load_preprocessor(trained.state),
    )
    source: Source
    if isinstance(store, ServiceStore):
        service_id = store.service_id if store.service_id is not None else trained.recipe.name
        source = ServiceRows(settings, store, preprocessor, service_id=service_id, party=files.name)
    elif settings.source.startswith(_POSTGRES):
        source = PostgresRows(settings, store.connections)
    else:
        source = AlchemyRows(settings, store.connections)
    try:
        source.check()
    except BaseException:
        source.close()
        raise
    rules = settings.with_id_rules(trained.recipe.rows).id_rules or ()
    as_cells = Course(trained.recipe).lone_phase is not None
    device = torch.device("cpu") if as_cells else files.device
    return ByIds(source, preprocessor, rules, device, advise, as_cells=as_cells)


def make_store_settings(
    files: PartyFiles, state: Tree, store: DatabaseStore | ServiceStore
) -> DataSettings:
    """Returns the settings for reading rows of the store. Raises InputError."""
    data = files.file.data
    if data is None or not data.id:
        raise InputError(
            Code.CONFIG_INVALID,
            f"party {files.name}: serve.store needs the id column. Add data.id.",
        )
    preprocessor = _load_preprocessor(state)
    if preprocessor.image_shape is not None or data.view is not None or data.parts:
        raise InputError(
            Code.CONFIG_INVALID,
            f"party {files.name}: serve.store needs a model that was trained on the columns of one "
            "table. Remove serve.store.",
        )
    if isinstance(store, ServiceStore):
        if len(data.id) > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {files.name}: a feature service needs an id of one column "
                f"(got {', '.join(data.id)}). Correct data.id.",
            )
        place: dict[str, Any] = {"source": store.url, "query": None}
    else:
        place = {"source": store.source or data.source, "query": store.query}
        if not is_database(place["source"]):
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {files.name}: data.source is not a database. Set serve.store.source.",
            )
    # Numbers are read in the format of the training table, whatever the other rows contain.
    style = preprocessor.style or (data.decimal or ".", data.thousands or "")
    written = {"decimal": style[0], "thousands": style[1], "limit_by": "first", "labels": ()}
    settings = data.model_copy(update={**_NOT_HERE, **written, **place})
    return prediction_data(settings, None, state)


def make_empty_table(preprocessor: Preprocessor, source: str) -> Table:
    """Returns a table without rows, with the columns of training."""
    numbers, words = preprocessor.numeric_names, preprocessor.categorical_names
    cells = Categories(np.empty((0, len(words)), np.int32), ((),) * len(words))
    return Table(
        source,
        (),
        numeric_NF=np.empty((0, len(numbers)), np.float32) if numbers else None,
        numeric_names=numbers,
        categorical=cells if words else None,
        categorical_names=words,
        kinds=preprocessor.kinds or {},
    )


def _load_preprocessor(state: Tree) -> Preprocessor:
    if state["preprocessor"] is None:
        raise InputError(
            Code.CONFIG_INVALID, "serve.store: this party has no features. Remove the table."
        )
    return Preprocessor.from_state(state["preprocessor"])


# Maximum number of different sentences of advice per program.
_MAX_ADVICE = 100


_ROW = re.compile(r"(, first)? in row 1\b( below the header)?")


log = logging.getLogger(__name__)


# A feature store that queries the rows of each question and prepares them as in training.
class _Part(NamedTuple):
    """Some ids with the encoder's inputs for each, or with the code in ``row`` instead."""

    ids: Sequence[str]
    inputs: tuple[Tensor, ...] = ()
    row: int = UNFIT_ROW


class ByIds:
    """Queries a source and prepares its rows. Any thread may call it.

    A row that cannot be used, such as text in a numeric column, affects only its own id. The
    recipe's ``predict.refuse_outside`` limits the share of such rows in a table, so it does not
    apply to single rows.

    Args:
        rules: The rules that normalise ids.
        device: The device of the encoder's inputs.
        advise: Shows a sentence to this party's operator.
        as_cells: Whether the model takes cells; see ``seam.LookupResult``.

    ``version``: the version of the features. It is constant, as a source does not report changes.
    """

    def __init__(
        self,
        source: Source,
        preprocessor: Preprocessor,
        rules: Sequence[str],
        device: torch.device,
        advise: Callable[[str], None],
        *,
        as_cells: bool = False,
    ) -> None:
        self.settings, self.preprocessor = source.settings, preprocessor
        self._source, self._rules = source, tuple(rules)
        self._device, self._advise, self._as_cells = device, advise, as_cells
        # The sentences that were shown; the lock is for threads that show the same sentence.
        self._reported: set[str] = set()
        self._reporting = threading.Lock()
        self.version = hashlib.sha256(f"{time.time_ns()} {id(self)}".encode()).hexdigest()[:16]

    def look_up(self, ids: Sequence[str | None], until_s: float) -> LookupResult:
        """Looks up the features of normalised ids; None stands for an invalid id.

        Raises TimeoutError at ``until_s`` (monotonic), and InputError if the query fails.
        """
        distinct_ids = list(dict.fromkeys(name for name in ids if name))
        row_numbers, parts, end = dict[str, int](), list[tuple[Tensor, ...]](), 0
        for part in self._fetch_parts(distinct_ids, until_s):
            if not part.inputs:
                row_numbers |= dict.fromkeys(part.ids, part.row)
                continue
            row_numbers |= {name: row for row, name in enumerate(part.ids, end)}
            end += len(part.ids)
            parts.append(part.inputs)
        rows = np.fromiter(
            (row_numbers.get(name or "", UNKNOWN_ROW) for name in ids), np.int64, len(ids)
        )
        all_inputs = [torch.cat(tensors).to(self._device) for tensors in zip(*parts, strict=True)]

        def inputs(at: Rows) -> tuple[Tensor, ...]:
            index = torch.from_numpy(at).to(self._device)
            return tuple(tensor.index_select(0, index) for tensor in all_inputs)

        return LookupResult(rows, inputs, self.version)

    def close(self) -> None:
        """Closes the source."""
        self._source.close()

    def _fetch_parts(self, wanted: Sequence[str], until_s: float) -> Iterator[_Part]:
        """Yields the known ids with inputs, and invalid ids with a code."""
        for some, batch in split_until_fit(wanted, lambda ids: self._source.rows(ids, until_s)):
            if isinstance(batch, ValueMismatchError):
                yield self._make_unfit(some, batch)
            elif batch.rows.num_rows:
                yield from self._prepare(batch, frozenset(some))

    def _prepare(self, batch: IdBatch, asked: frozenset[str]) -> Iterator[_Part]:
        rows, names, repeated = self._choose_rows(batch, asked)
        if repeated:
            error = ValueMismatchError(
                Code.DATA_INVALID,
                f"{self.name}: returns repeated_ids rows for one id. Set data.duplicates.",
            )
            yield self._make_unfit(repeated, error)

        def prepare(at: Sequence[int]) -> tuple[Sequence[str], tuple[Tensor, ...]]:
            table = self._table(IdBatch(rows.take(pa.array(at)), batch.as_written))
            try:
                inputs = self._inputs(table)
            except InputError as error:
                raise ValueMismatchError(error.code, str(error)) from None
            self._advise_unusual(table)
            return table.ids, inputs

        for some, prepared in split_until_fit(range(rows.num_rows), prepare):
            if isinstance(prepared, ValueMismatchError):
                yield self._make_unfit([names[at] for at in some], prepared)
            else:
                yield _Part(*prepared)

    def _inputs(self, table: Table) -> tuple[Tensor, ...]:
        """Returns the model's inputs for the rows of a table, [N, …] each. Raises InputError."""
        if self._as_cells:
            return tuple(torch.from_numpy(array) for array in self.preprocessor.cells(table)[:2])
        features = self.preprocessor.transform(table)
        return features.inputs(np.arange(len(table), dtype=np.int64))

    def _choose_rows(
        self, batch: IdBatch, asked: frozenset[str]
    ) -> tuple[pa.Table, Sequence[str], Sequence[str]]:
        """Returns the rows to use, their ids, and the ids whose repeated rows are an error.

        Raises InputError for rows of ids that were not requested.
        """
        settings, rows = self.settings, batch.rows.combine_chunks()
        columns = [rows[name].combine_chunks() for name in settings.id]
        if batch.as_written:
            columns = [strip_mark(pc.cast(column, pa.string())) for column in columns]
        cells = [
            id_texts(self.name, name, column)
            for name, column in zip(settings.id, columns, strict=True)
        ]
        places = dict[str, list[int]]()
        for at, text in enumerate(normalize_ids(cells, self._rules).to_pylist()):
            if text is not None:
                places.setdefault(text, []).append(at)
        if not asked.issuperset(places):
            raise checks.unusable(
                self.name,
                "returns rows of other ids than those of the question. Correct the condition of "
                "serve.store.query.",
            )
        repeated_ids = [text for text, at in places.items() if len(at) > 1]
        if settings.duplicates != "first":
            for text in repeated_ids:
                del places[text]
        first_rows = [at[0] for at in places.values()]
        refused = repeated_ids if settings.duplicates == "error" else []
        return rows.take(pa.array(first_rows, pa.int64())), list(places), refused

    def _table(self, batch: IdBatch) -> Table:
        """Returns rows as a table, sorted by id. Raises ValueMismatchError."""
        settings = self.settings

        def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
            yield from batch.rows.select(list(wanted)).combine_chunks().to_batches()

        names = tuple(batch.rows.column_names)
        stream = RowStream(self.name, names, batch.as_written, blocks, ordered=False)
        try:
            return tabulate(collect(stream, settings, False), settings, False)
        except InputError as error:
            raise ValueMismatchError(error.code, str(error)) from None

    @property
    def name(self) -> str:
        """Returns the source's name for messages, without passwords."""
        return hide_passwords(self.settings.source)

    def _make_unfit(self, ids: Sequence[str], error: ValueMismatchError) -> _Part:
        if error.row == UNFIT_ROW:
            # The query was for this row alone, so its row number is not useful.
            self._advise_once(f"a row cannot be scored (reported once): {_ROW.sub('', str(error))}")
        return _Part(ids, row=error.row)

    def _advise_unusual(self, table: Table) -> None:
        """Advises once for each column whose values differ from those of training."""
        for name in self.preprocessor.unseen(table):
            self._advise_once(
                f"{self.name}: column {name!r} has categories that the training table does not "
                "have (reported once)"
            )
        for name in self.preprocessor.outside(table):
            self._advise_once(
                f"{self.name}: column {name!r} has numbers far outside the range of training "
                "(reported once). Check their unit."
            )

    def _advise_once(self, text: str) -> None:
        with self._reporting:
            # Sentences may contain numbers, so their total is limited.
            if text in self._reported or len(self._reported) >= _MAX_ADVICE:
                return
            self._reported.add(text)
        log.warning("%s", text, extra={"event": "advice"})
        self._advise(text)
