"""The models of a serving party and the features of ids. A table in memory is reloaded when it
changes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import is_path
from vfl_common.errors import Code, InputError, VflError
from vfl_common.text import hide_passwords, list_names, shorten
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import (
    Assembled,
    Load,
    OpenedParty,
    assemble,
    expect_rows,
    load,
    open_party,
)
from vfl_party.base.phase import Phase
from vfl_party.base.seeds import Rows
from vfl_party.data.id_rules import SEPARATOR, normalize_ids
from vfl_party.data.rows import Prepared
from vfl_party.methods.probe.exchanges import get_latent_shape
from vfl_party.models import forward
from vfl_party.models.layers import StochasticEncoder, deterministic
from vfl_party.models.row_blocks import describe_inexact, in_blocks
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.online import Cells
from vfl_party.phases.scoring import SOLO, split_into_chunks
from vfl_party.predict.prediction import Prediction
from vfl_party.predict.results import id_names
from vfl_party.predict.run import TrainedRun, prediction_data, unseen
from vfl_party.predict.trained import TrainedParty, of_state
from vfl_serve.stores.opened import ByIds, make_empty_table, open_store
from vfl_serve.stores.seam import UNKNOWN_ROW, LookupResult

# Maximum number of characters of an id with all its columns, before and after normalisation: the
# ids of a question must fit into a gRPC message.
LONGEST_ID = 1_000
# Default seconds between two checks whether the table's files have changed.
_REFRESH_S = 5.0

log = logging.getLogger(__name__)


class ServingWork(Prediction):
    """Prepares the models and rows for requests; see ``vfl_party.assembly.party.Work``."""

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        _ = prepared
        self.prepare_scoring(party)
        return []


@dataclass(frozen=True)
class Held:
    """A party's rows and models. A changed table gets a new object.

    Args:
        party: The party with models and features.
        places: {normalised id: row number}; empty if ``asks`` is given.
        version: A random name of this state of the table; it reveals nothing about the rows.
        rules: The rules that normalise ids.
        columns: The names of the id columns.
        preparing: Prepares rows that a caller sends; None if the party has no features.
        make_inputs: The ``LookupResult.inputs`` for rows in memory.
        asks: The store that is queried for each question; None: the rows are in memory.
    """

    party: Party
    places: Mapping[str, int]
    version: str
    rules: tuple[str, ...]
    columns: tuple[str, ...]
    preparing: TrainedParty | None
    make_inputs: Callable[[Rows], tuple[Tensor, ...]]
    asks: ByIds | None = None

    @property
    def features_version(self) -> str:
        """Returns the version of the features, which answers contain."""
        return self.version if self.asks is None else self.asks.version

    @property
    def inexact(self) -> str:
        """Returns why the last bits of a row's scores may depend on the other rows of a request;
        '' if they do not.
        """
        return describe_inexact(self.party.scores.blocks)

    @property
    def widths(self) -> Mapping[str, int]:
        """Returns {passive party: how many numbers it sends for an id}.

        They are an embedding, or the latents of a row if parties hold different rows.
        """
        party = self.party
        if not party.recipe.own_rows:
            return party.exchanges.widths
        return dict.fromkeys((passive.name for passive in party.recipe.passives), self._latents)

    @cached_property
    def _latents(self) -> int:
        return math.prod(get_latent_shape(self.party))

    def normalize(self, ids: Sequence[str]) -> list[str | None]:
        """Returns ids in the spelling of the alignment, with None for invalid ids.

        The cells of an id of several columns are in order, with ``SEPARATOR`` between them.
        """
        if len(self.columns) == 1 and not self.rules:
            # This gives the same result as below, and is faster for few ids.
            return [
                text if text and not text.isspace() and len(text) <= LONGEST_ID else None
                for text in ids
            ]
        if len(self.columns) == 1:
            cells: list[Sequence[str | None]] = [ids]
        else:
            split = [text.split(SEPARATOR) for text in ids]
            complete = [parts if len(parts) == len(self.columns) else None for parts in split]
            cells = [
                [parts[at] if parts is not None else None for parts in complete]
                for at in range(len(self.columns))
            ]
        normalized: list[str | None] = normalize_ids(cells, self.rules).to_pylist()
        # The normal form of Unicode can be 18 times as long.
        return [
            text if text is not None and len(text) <= LONGEST_ID else None for text in normalized
        ]

    def look_up(self, ids: Sequence[str | None], until_s: float) -> LookupResult:
        """Looks up the features of normalised ids; None stands for an invalid id.

        Raises TimeoutError at ``until_s`` (monotonic), and InputError if the query fails.
        """
        if self.asks is not None:
            return self.asks.look_up(ids, until_s)
        places = self.places
        numbers = (places.get(name, UNKNOWN_ROW) if name else UNKNOWN_ROW for name in ids)
        rows = np.fromiter(numbers, np.int64, len(ids))
        return LookupResult(rows, self.make_inputs, self.version)

    def cells(self, result: LookupResult, rows: Rows) -> Cells:
        """Returns the cells of ``rows`` of ``result``, for a model that takes cells."""
        numbers_NF, codes_NK = result.inputs(rows)
        return numbers_NF.numpy(), codes_NK.numpy()

    @property
    def draws(self) -> bool:
        """Returns whether the encoder samples its embeddings at random."""
        return isinstance(self.party.models.get("encoder"), StochasticEncoder)

    @torch.no_grad()
    def embed(self, result: LookupResult, rows: Rows, *, drawn: bool = True) -> Tensor:
        """Returns this party's embeddings of ``rows`` of ``result``, float32 [N, D], on the CPU.

        A row's embedding does not depend on the other rows, unless the encoder samples embeddings.
        ``drawn``: whether such an encoder samples; otherwise it returns the means.
        """
        party = self.party
        parties_hold_own_rows = party.recipe.own_rows
        encode: Callable[..., Tensor] = (
            party.models["encoder"] if parties_hold_own_rows else party.encode
        )
        if not drawn:
            encode = deterministic(party.models["encoder"])
        blocks = party.scores.blocks.get("encoder")
        parts = [
            in_blocks(encode, blocks, *result.inputs(chunk)) for chunk in split_into_chunks(rows)
        ]
        empty = torch.empty(0, self._latents if parties_hold_own_rows else party.exchanges.width)
        embeddings = torch.cat(parts).cpu() if parts else empty
        return embeddings.flatten(1) if parties_hold_own_rows else embeddings

    @torch.no_grad()
    def score_by_student(self, result: LookupResult, rows: Rows) -> Tensor | None:
        """Returns the student's outputs for ``rows`` of ``result``, [N, O]; None if the run has no
        student.
        """
        if SOLO not in self.party.models:
            return None
        parts = [self._run_student(*result.inputs(chunk)) for chunk in split_into_chunks(rows)]
        empty = torch.empty(0, self.party.recipe.task.outputs, device=self.party.device)
        return torch.cat(parts) if parts else empty

    @torch.no_grad()
    def score_given_by_student(self, columns: Mapping[str, Sequence[Any]], n: int) -> Tensor | None:
        """Returns the student's outputs for rows that a caller sends.

        See ``score_by_student`` and ``embed_given``.
        """
        if SOLO not in self.party.models:
            return None
        return self._run_student(*self._prepare_inputs(columns, n))

    def _run_student(self, *inputs: Tensor) -> Tensor:
        """Returns the student's outputs [N, O] for an encoder's inputs, [N, …] each."""
        party = self.party
        precision = party.recipe.model.precision
        student = partial(forward, party.models[SOLO], precision=precision)
        return in_blocks(student, party.scores.blocks.get(SOLO), *inputs)

    @torch.no_grad()
    def embed_given(self, columns: Mapping[str, Sequence[Any]], n: int) -> Tensor:
        """Returns this party's embeddings of ``n`` rows that a caller sends.

        They are float32 [N, D], on the CPU. Raises InputError if the columns differ from those of
        training.
        """
        party = self.party
        return in_blocks(
            party.encode, party.scores.blocks.get("encoder"), *self._prepare_inputs(columns, n)
        ).cpu()

    def _prepare_inputs(self, columns: Mapping[str, Sequence[Any]], n: int) -> list[Tensor]:
        """Returns the encoder's inputs for rows that a caller sends, [N, …] each."""
        preparing, table = self._check_columns(columns, n)
        return [tensor.to(self.party.device) for tensor in preparing.inputs(table)]

    def cells_given(self, columns: Mapping[str, Sequence[Any]], n: int) -> Cells:
        """Returns the cells of ``n`` rows that a caller sends; see ``embed_given``."""
        preparing, table = self._check_columns(columns, n)
        return preparing.cells(table)

    def _check_columns(
        self, columns: Mapping[str, Sequence[Any]], n: int
    ) -> tuple[TrainedParty, pa.Table]:
        """Returns the object that prepares a caller's rows, and the rows. Raises InputError."""
        if self.preparing is None:
            raise InputError(
                Code.DATA_INVALID, f"columns: {self.party.name} has no features. Leave columns out."
            )
        preprocessor = self.preparing.preprocessor
        training_columns = (
            (*preprocessor.numeric_names, *preprocessor.categorical_names)
            if preprocessor is not None
            else ()
        )
        unknown = [name for name in columns if name not in training_columns]
        if unknown:
            names = list_names([shorten(name) for name in unknown])
            raise InputError(
                Code.DATA_INVALID,
                f"columns: the model was not trained with {names}. Leave out columns that are not "
                "in the training table.",
            )
        try:
            table = pa.table({name: pa.array(values) for name, values in columns.items()})
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise InputError(
                Code.DATA_INVALID,
                "columns: each must have values of one type, and all must have the same length. "
                "Correct the request.",
            ) from None
        if table.num_rows != n:
            raise InputError(
                Code.DATA_INVALID,
                f"columns: must have one value per id (got {table.num_rows:,} values for {n:,} "
                "ids). Correct the request.",
            )
        return self.preparing, table


def _make_input_function(party: Party) -> Callable[[Rows], tuple[Tensor, ...]]:
    """Returns a function from row numbers to the encoder's arguments.

    For a model that takes cells it returns cells; without features it returns nothing.
    """
    features, columns = party.rows.features, party.rows.data.columns
    if features is None or columns is None:
        return lambda _rows: ()
    if party.course.lone_phase is None:
        return features.inputs
    cells = tuple(torch.from_numpy(array) for array in columns()[:2])
    return lambda rows: tuple(tensor[torch.from_numpy(rows)] for tensor in cells)


class FeatureLookup:
    """Replaces ``held``, the current rows and models, when the table changes.

    Readers never wait for a reload.

    Args:
        trained: The trained run.
        say: Reports an event to this party's operator.
        source, query: See ``prediction_data``.
    """

    def __init__(
        self,
        files: PartyFiles,
        trained: TrainedRun,
        say: Callable[..., None],
        source: str | None = None,
        query: str | None = None,
    ) -> None:
        self._files, self._trained, self._say = files, trained, say
        store = files.file.serve.store
        self._ended = threading.Event()
        self._renewed: list[Callable[[], None]] = []
        self._advice = self._fingerprint = ""
        if store is None:
            self._settings = prediction_data(files.file.data, source, trained.state, query)
            # The state of the files when the table was read, and at the last check.
            self._read_stats = self._last_stats = _stat_files(self._settings)
            self.held, self._fingerprint = self._read()
            self._report_inexact()
            return
        if source is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--data: cannot be combined with serve.store (kind {store.kind!r}). Remove one of "
                "them.",
            )
        asks = open_store(files, trained, store, lambda text: say("advice", said=text))
        self._settings = asks.settings
        try:
            self.held, _ = self._assemble(
                self._settings,
                asks=asks,
                load=lambda *_: make_empty_table(asks.preprocessor, asks.name),
            )
        except BaseException:
            asks.close()
            raise
        self._report_inexact()

    def _report_inexact(self) -> None:
        if why := self.held.inexact:
            self._say(
                "advice",
                said=f"scores may differ from vfl-party predict in their last bits ({why})",
            )

    @property
    def at_once(self) -> int:
        """Returns how many questions may be looked up at the same time."""
        store = self._files.file.serve.store
        return 1 if store is None else store.connections

    def watch(self) -> None:
        """Starts a thread that checks the table for changes."""
        if self._refresh_s and self.held.asks is None:
            threading.Thread(target=self._watch, name="refresh", daemon=True).start()

    def when_renewed(self, call: Callable[[], None]) -> None:
        """Registers ``call``, which the watching thread calls after each reload with new rows."""
        self._renewed.append(call)

    def close(self) -> None:
        """Stops the watching thread and closes the store."""
        self._ended.set()
        if self.held.asks is not None:
            self.held.asks.close()

    @property
    def _refresh_s(self) -> float:
        interval_s = self._files.file.serve.refresh_s
        if interval_s is not None:
            return interval_s
        # A change in a database is only visible after reading the whole table.
        return _REFRESH_S if is_path(self._settings.source) else 0.0

    def _watch(self) -> None:
        while not self._ended.wait(self._refresh_s):
            if self.refresh():
                for call in self._renewed:
                    call()

    def refresh(self) -> bool:
        """Reloads the table if it has changed and did not change between the last two calls.

        Returns whether the rows are new. If the table cannot be used, the old rows stay.
        """
        stats = _stat_files(self._settings)
        last_stats, self._last_stats = self._last_stats, stats
        # A file that has changed since the last check may be half written.
        if is_path(self._settings.source) and (stats == self._read_stats or stats != last_stats):
            return False
        try:
            held, fingerprint = self._read()
        except VflError as error:
            self._read_stats = stats
            text = f"cannot reload the table ({error}); the rows read before stay in use"
            if text != self._advice:
                log.warning("%s", text, extra={"event": "refresh"})
                self._say("advice", said=text)
            self._advice = text
            return False
        self._advice = ""
        if _stat_files(self._settings) != stats:
            return False
        self._read_stats = stats
        if fingerprint == self._fingerprint:
            return False
        self.held, self._fingerprint = held, fingerprint
        self._say("refreshed", rows=len(held.places), source=hide_passwords(self._settings.source))
        return True

    def _read(self) -> tuple[Held, str]:
        return self._assemble(self._settings)

    def _assemble(
        self, settings: DataSettings, asks: ByIds | None = None, load: Load = load
    ) -> tuple[Held, str]:
        """Returns the models with the rows that ``load`` reads, and the rows' digest."""
        files, trained = self._files, self._trained
        work = ServingWork(trained, files.settings, id_names(settings), ())
        opened = open_party(
            trained.recipe, files.name, settings, trained.encoder, load=load, work=work
        )
        assembled = assemble(
            opened, expect_rows(opened), device=files.device, policy=files.policy()
        )
        fingerprint = _fingerprint(assembled)
        if fingerprint != self._fingerprint:
            for text in unseen(trained, opened.table):
                self._say("unseen", said=text)
        preparing = None
        if trained.state["preprocessor"] is not None:
            preparing = of_state(
                trained.run_id, files.name, trained.recipe, trained.encoder, trained.state
            )
        return _make_held(opened, assembled, work.ids, preparing, asks), fingerprint


def _fingerprint(assembled: Assembled) -> str:
    """Returns the digest of the prepared rows."""
    prepared = assembled.prepared
    if assembled.party.course.lone_phase is None or prepared.preprocessor is None:
        return prepared.fingerprint
    # These models distinguish an empty cell from the number that fills it for encoders.
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for array in prepared.cells()[:2]:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _make_held(
    opened: OpenedParty,
    assembled: Assembled,
    columns: Sequence[str],
    preparing: TrainedParty | None,
    asks: ByIds | None,
) -> Held:
    party = assembled.party
    for model in party.models.values():
        model.eval()
    places = {name: at for at, name in enumerate(assembled.prepared.table.ids)}
    version = hashlib.sha256(f"{time.time_ns()} {id(assembled)}".encode()).hexdigest()[:16]
    rules = opened.settings.with_id_rules(opened.recipe.rows).id_rules or ()
    return Held(
        party,
        places,
        version,
        rules=tuple(rules),
        columns=tuple(columns),
        preparing=preparing,
        make_inputs=_make_input_function(party),
        asks=asks,
    )


def _stat_files(settings: DataSettings) -> tuple[Any, ...]:
    """Returns path, size, time and inode of each file of a table, to find changes."""
    parts = settings.parts.values() or [settings]
    paths = [Path(part.source) for part in parts if is_path(part.source)]
    files = [
        file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    stats = []
    for file in files:
        try:
            about = file.stat()
        except OSError:
            continue
        stats.append((str(file), about.st_size, about.st_mtime_ns, about.st_ino))
    return tuple(stats)


def require_served(trained: TrainedRun) -> None:
    """Raises InputError if this kind of model cannot be served."""
    if trained.recipe.rows.matching_columns:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{trained.path}: a served model finds a row by one id, but the recipe has rows.keys "
            "or rows.fuzzy. Use vfl-party predict.",
        )
    phase = Course(trained.recipe).lone_phase
    if phase is not None and not phase.says("online"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{trained.path}: a model of kind {phase.kind!r} does not support scoring by id. Use "
            "vfl-party predict.",
        )
