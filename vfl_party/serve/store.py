"""What a serving party holds: its models, and the features of ids; a table in memory is renewed
while it serves.
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

from vfl_common.config.data import DataSettings, is_path
from vfl_common.errors import Code, InputError, VflError
from vfl_common.passwords import hide_passwords
from vfl_common.text import list_names, shorten
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
from vfl_party.data.ids import SEPARATOR, normalize_ids
from vfl_party.data.rows import Prepared
from vfl_party.methods.probe.cut import get_latent_shape
from vfl_party.models import forward
from vfl_party.models.row_blocks import describe_inexact, in_blocks
from vfl_party.models.stochastic import StochasticEncoder, deterministic
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.online import Cells
from vfl_party.phases.scoring import SOLO, split_into_chunks
from vfl_party.predict.prediction import Prediction, TrainedRun, prediction_data, unseen
from vfl_party.predict.results import id_names
from vfl_party.predict.trained import TrainedParty, of_state
from vfl_party.serve.stores.by_ids import ByIds
from vfl_party.serve.stores.opened import no_rows, open_store
from vfl_party.serve.stores.seam import UNKNOWN_ROW, LookupResult

# Limit of one id with all its columns, in characters, before and after normalisation: the ids of
# one question must fit into a gRPC message.
LONGEST_ID = 1_000
# Interval between two looks at a table's files.
_REFRESH_S = 5.0

log = logging.getLogger(__name__)


class ServingWork(Prediction):
    """See ``vfl_party.assembly.party.Work``: rows that wait to be asked for."""

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        _ = prepared
        self.prepare_scoring(party)
        return []


@dataclass(frozen=True)
class Held:
    """A party's rows and models, as they are until the table changes.

    Args:
        party: with models and features.
        places: {id, as the parties spell it: row}; empty if ``asks`` is given.
        version: names this state of the table; it says nothing of what is in it.
        rules: how ids are spelt.
        columns: the names of the id columns.
        preparing: prepares rows that a caller gives; None without features.
        gives: what ``LookupResult.inputs`` gives, for the rows in memory.
        asks: the store that is asked for the rows of each question; None: they are in memory.
    """

    party: Party
    places: Mapping[str, int]
    version: str
    rules: tuple[str, ...]
    columns: tuple[str, ...]
    preparing: TrainedParty | None
    gives: Callable[[Rows], tuple[Tensor, ...]]
    asks: ByIds | None = None

    @property
    def features_version(self) -> str:
        """Names the state of the features, as answers do."""
        return self.version if self.asks is None else self.asks.version

    @property
    def inexact(self) -> str:
        """Why a row's scores may depend in their last bits on the rows that are asked for with it,
        of this party's models; '' if they do not.
        """
        return describe_inexact(self.party.scores.blocks)

    @property
    def widths(self) -> Mapping[str, int]:
        """{passive party: how many numbers it sends of an id}: an embedding, or the latents of a
        row that others do not hold.
        """
        party = self.party
        if not party.recipe.own_rows:
            return party.widths
        return dict.fromkeys((passive.name for passive in party.recipe.passives), self._latents)

    @cached_property
    def _latents(self) -> int:
        return math.prod(get_latent_shape(self.party))

    def spelt(self, ids: Sequence[str]) -> list[str | None]:
        """Returns ids as the parties have matched them; None for what is no id.

        An id of several columns has its cells in their order, with ``SEPARATOR`` between them.
        """
        if len(self.columns) == 1 and not self.rules:
            # The same, and much sooner for a few.
            return [
                text if text and not text.isspace() and len(text) <= LONGEST_ID else None
                for text in ids
            ]
        if len(self.columns) == 1:
            cells: list[Sequence[str | None]] = [ids]
        else:
            split = [text.split(SEPARATOR) for text in ids]
            whole = [parts if len(parts) == len(self.columns) else None for parts in split]
            cells = [
                [parts[at] if parts is not None else None for parts in whole]
                for at in range(len(self.columns))
            ]
        spelt: list[str | None] = normalize_ids(cells, self.rules).to_pylist()
        # Unicode's normal form may be 18 times as long.
        return [text if text is not None and len(text) <= LONGEST_ID else None for text in spelt]

    def look_up(self, ids: Sequence[str | None], until_s: float) -> LookupResult:
        """Returns what is known of ids, as the parties spell them; None is no id.

        Raises TimeoutError at ``until_s`` (monotonic), and InputError if the store cannot be asked.
        """
        if self.asks is not None:
            return self.asks.look_up(ids, until_s)
        places = self.places
        numbers = (places.get(name, UNKNOWN_ROW) if name else UNKNOWN_ROW for name in ids)
        rows = np.fromiter(numbers, np.int64, len(ids))
        return LookupResult(rows, self.gives, self.version)

    def cells(self, result: LookupResult, rows: Rows) -> Cells:
        """Returns the cells of rows of ``result``, of a model that takes these."""
        numbers_NF, codes_NK = result.inputs(rows)
        return numbers_NF.numpy(), codes_NK.numpy()

    @property
    def draws(self) -> bool:
        """Whether the encoder draws its embeddings."""
        return isinstance(self.party.models.get("encoder"), StochasticEncoder)

    @torch.no_grad()
    def embed(self, result: LookupResult, rows: Rows, *, drawn: bool = True) -> Tensor:
        """Returns the party's embeddings of rows of ``result``, float32 [N, D], on the CPU.

        A row has the same embedding whichever rows are asked for with it, unless the encoder draws
        embeddings: its noise depends on the other rows. ``drawn``: whether it does so here; else it
        gives their means.
        """
        party = self.party
        own = party.recipe.own_rows
        encode: Callable[..., Tensor] = party.models["encoder"] if own else party.encode
        if not drawn:
            encode = deterministic(party.models["encoder"])
        blocks = party.scores.blocks.get("encoder")
        parts = [
            in_blocks(encode, blocks, *result.inputs(chunk)) for chunk in split_into_chunks(rows)
        ]
        empty = torch.empty(0, self._latents if own else party.embedding_size)
        whole = torch.cat(parts).cpu() if parts else empty
        return whole.flatten(1) if own else whole

    @torch.no_grad()
    def solo(self, result: LookupResult, rows: Rows) -> Tensor | None:
        """Returns what the run's student gives for rows of ``result``, [N, O]; None if it has
        trained none.
        """
        if SOLO not in self.party.models:
            return None
        parts = [self._student(*result.inputs(chunk)) for chunk in split_into_chunks(rows)]
        empty = torch.empty(0, self.party.recipe.task.outputs, device=self.party.device)
        return torch.cat(parts) if parts else empty

    @torch.no_grad()
    def solo_given(self, columns: Mapping[str, Sequence[Any]], n: int) -> Tensor | None:
        """Returns what the run's student gives for rows of a caller; see ``solo`` and
        ``embed_given``.
        """
        if SOLO not in self.party.models:
            return None
        return self._student(*self._inputs_of(columns, n))

    def _student(self, *inputs: Tensor) -> Tensor:
        """Returns the student's outputs [N, O] for an encoder's inputs, [N, …] each."""
        party = self.party
        precision = party.recipe.model.precision
        student = partial(forward, party.models[SOLO], precision=precision)
        return in_blocks(student, party.scores.blocks.get(SOLO), *inputs)

    @torch.no_grad()
    def embed_given(self, columns: Mapping[str, Sequence[Any]], n: int) -> Tensor:
        """Returns the party's embeddings of ``n`` rows that a caller gives, float32 [N, D], on the
        CPU. Raises InputError if the columns are not those of training.
        """
        party = self.party
        return in_blocks(
            party.encode, party.scores.blocks.get("encoder"), *self._inputs_of(columns, n)
        ).cpu()

    def _inputs_of(self, columns: Mapping[str, Sequence[Any]], n: int) -> list[Tensor]:
        """Returns the encoder's inputs of rows of a caller, [N, …] each."""
        preparing, table = self._check_columns(columns, n)
        return [tensor.to(self.party.device) for tensor in preparing.inputs(table)]

    def cells_given(self, columns: Mapping[str, Sequence[Any]], n: int) -> Cells:
        """Returns the cells of ``n`` rows that a caller gives; see ``embed_given``."""
        preparing, table = self._check_columns(columns, n)
        return preparing.cells(table)

    def _check_columns(
        self, columns: Mapping[str, Sequence[Any]], n: int
    ) -> tuple[TrainedParty, pa.Table]:
        """Returns rows of a caller, and what prepares them. Raises InputError."""
        if self.preparing is None:
            raise InputError(
                Code.DATA_INVALID, f"columns: {self.party.name} has no features. Leave columns out."
            )
        known = self.preparing.preprocessor
        wanted = (*known.numeric_names, *known.categorical_names) if known is not None else ()
        more = [name for name in columns if name not in wanted]
        if more:
            names = list_names([shorten(name) for name in more])
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


def _gives(party: Party) -> Callable[[Rows], tuple[Tensor, ...]]:
    """Returns what gives the encoder's arguments, or the cells for a model that takes these; none
    for a party without features.
    """
    features, columns = party.features, party.data.columns
    if features is None or columns is None:
        return lambda _rows: ()
    if party.course.lone_phase is None:
        return features.inputs
    whole = tuple(torch.from_numpy(array) for array in columns()[:2])
    return lambda rows: tuple(tensor[torch.from_numpy(rows)] for tensor in whole)


class FeatureLookup:
    """Keeps a ``Held`` that is renewed when the table changes; readers never wait for that.

    Args:
        trained: the model.
        say: shows a sentence to the person here.
        source, query: as in ``prediction_data``.

    ``held``: the rows and models, as they are now.
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
            # As it was read, and as it was seen last.
            self._looked = self._seen = _look(self._settings)
            self.held, self._fingerprint = self._read()
            self._tell_inexact()
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
            self.held, _ = self._make(
                self._settings, asks=asks, load=lambda *_: no_rows(asks.preprocessor, asks.name)
            )
        except BaseException:
            asks.close()
            raise
        self._tell_inexact()

    def _tell_inexact(self) -> None:
        if why := self.held.inexact:
            self._say(
                "advice",
                said=f"scores may differ from vfl-party predict in their last bits ({why})",
            )

    @property
    def at_once(self) -> int:
        """How many questions may be looked up at the same time."""
        store = self._files.file.serve.store
        return 1 if store is None else store.connections

    def watch(self) -> None:
        """Looks for changes of the table from now on, in a separate thread."""
        if self._refresh_s and self.held.asks is None:
            threading.Thread(target=self._watch, name="refresh", daemon=True).start()

    def when_renewed(self, call: Callable[[], None]) -> None:
        """Has ``call`` called whenever the rows are new, in the watching thread."""
        self._renewed.append(call)

    def close(self) -> None:
        """Ends the watch, and closes what is open."""
        self._ended.set()
        if self.held.asks is not None:
            self.held.asks.close()

    @property
    def _refresh_s(self) -> float:
        interval_s = self._files.file.serve.refresh_s
        if interval_s is not None:
            return interval_s
        # What is no file must be read whole to see a change.
        return _REFRESH_S if is_path(self._settings.source) else 0.0

    def _watch(self) -> None:
        while not self._ended.wait(self._refresh_s):
            if self.refresh():
                for call in self._renewed:
                    call()

    def refresh(self) -> bool:
        """Reads the table again if it has changed; a file must stay as it is from one call to the
        next. Returns whether the rows are new: a table that cannot be used leaves the old ones in
        their place.
        """
        looked = _look(self._settings)
        seen, self._seen = self._seen, looked
        # One that has changed since the last look may be half written, and its last number cut.
        if is_path(self._settings.source) and (looked == self._looked or looked != seen):
            return False
        try:
            held, fingerprint = self._read()
        except VflError as error:
            self._looked = looked
            text = f"cannot reload the table ({error}); the rows read before stay in use"
            if text != self._advice:
                log.warning("%s", text, extra={"event": "refresh"})
                self._say("advice", said=text)
            self._advice = text
            return False
        self._advice = ""
        if _look(self._settings) != looked:
            return False
        self._looked = looked
        if fingerprint == self._fingerprint:
            return False
        self.held, self._fingerprint = held, fingerprint
        self._say("refreshed", rows=len(held.places), source=hide_passwords(self._settings.source))
        return True

    def _read(self) -> tuple[Held, str]:
        return self._make(self._settings)

    def _make(
        self, settings: DataSettings, asks: ByIds | None = None, load: Load = load
    ) -> tuple[Held, str]:
        """Returns models with the rows that ``load`` reads, and the digest of the rows."""
        files, trained = self._files, self._trained
        work = ServingWork(trained, files.settings, id_names(settings), ())
        opened = open_party(
            trained.recipe, files.name, settings, trained.encoder, load=load, work=work
        )
        made = assemble(opened, expect_rows(opened), device=files.device, policy=files.policy())
        fingerprint = _fingerprint(made)
        if fingerprint != self._fingerprint:
            for text in unseen(trained, opened.table):
                self._say("unseen", said=text)
        preparing = None
        if trained.state["preprocessor"] is not None:
            preparing = of_state(
                trained.run_id, files.name, trained.recipe, trained.encoder, trained.state
            )
        return _make_held(opened, made, work.ids, preparing, asks), fingerprint


def _fingerprint(made: Assembled) -> str:
    """Returns the digest of the rows as the model takes them."""
    prepared = made.prepared
    if made.party.course.lone_phase is None or prepared.preprocessor is None:
        return prepared.fingerprint
    # An empty cell is not the number that fills it for encoders.
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for array in prepared.cells()[:2]:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _make_held(
    opened: OpenedParty,
    made: Assembled,
    columns: Sequence[str],
    preparing: TrainedParty | None,
    asks: ByIds | None,
) -> Held:
    party = made.party
    for model in party.models.values():
        model.eval()
    places = {name: at for at, name in enumerate(made.prepared.table.ids)}
    version = hashlib.sha256(f"{time.time_ns()} {id(made)}".encode()).hexdigest()[:16]
    rules = opened.settings.with_id_rules(tuple(opened.recipe.rows.id_rules)).id_rules or ()
    return Held(
        party,
        places,
        version,
        rules=tuple(rules),
        columns=tuple(columns),
        preparing=preparing,
        gives=_gives(party),
        asks=asks,
    )


def _look(settings: DataSettings) -> tuple[Any, ...]:
    """Returns what changes if the files of a table change: their sizes and times."""
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
    """Raises InputError if the model cannot be served."""
    own = Course(trained.recipe).lone_phase
    if own is not None and not own.says("online"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{trained.path}: a model of kind {own.kind!r} does not support scoring by id. Use "
            "vfl-party predict.",
        )
