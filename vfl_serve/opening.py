"""Opens the runs that a party serves, each with its rows, counts and ledger."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Ledger
from vfl_common.config.party import PartyFile, ServeSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import require_writable
from vfl_common.identity.credentials import BOTH, DIALS, collect_members
from vfl_common.identity.keyring import Keyring
from vfl_common.process.logs import Console
from vfl_common.rpc.serving.stream import OutgoingMessage, RecordMessage
from vfl_common.text import list_names
from vfl_party.assembly.files import PartyFiles, read_files
from vfl_party.policy.guards import (
    ServingApproval,
    ServingGuard,
    list_leave_checks,
    make_serving_guards,
    words_of,
)
from vfl_party.predict.run import TrainedRun, load_joint, load_solo
from vfl_party.record.book import RecordBook, folder_of
from vfl_party.record.heads import HeadExchange
from vfl_party.record.recorder import RecordedRun, Recorder, ServingRecord
from vfl_serve.kinds import get_row_bytes
from vfl_serve.scored import Counts
from vfl_serve.store import FeatureLookup, require_served

# Maximum bytes of an answer; a gRPC message may have twice as many.
_ANSWER_BYTES = 2 << 20
# A file in the party's folder of the run: the bytes sent and received in its last serving.
BYTES = "serve-bytes.json"

log = logging.getLogger(__name__)


class Disk:
    """Notes whether the last write to the record has failed. Any thread may use it.

    Args:
        folder: The folder of the record.
        say: Shows a sentence to this party's operator, once per failure.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._lock, self._failed = threading.Lock(), False

    def note_failures(self, write: RecordMessage) -> RecordMessage:
        """Returns a function that calls ``write`` and notes its failures."""

        def write_watched(outgoing: OutgoingMessage) -> None:
            try:
                write(outgoing)
            except VflError as error:
                # Refusals of the account or a grant have another code.
                if error.code is Code.FILE_INVALID:
                    self._note(error)
                raise
            # On a full disk a short line may succeed and the next line fail, so check again.
            self.ready()

        return write_watched

    def ready(self) -> bool:
        """Returns whether the record can be written.

        After a failure this writes a test file, because callers that wait for readiness cause no
        writes.
        """
        if self._failed:
            with contextlib.suppress(VflError):
                require_writable(self._folder)
                self._note(None)
        return not self._failed

    def _note(self, error: VflError | None) -> None:
        with self._lock:
            failed_before, self._failed = self._failed, error is not None
        if failed_before == (error is not None):
            return
        if error is not None:
            text = f"{error} No request is answered until then."
            log.error("%s", text, extra={"event": "unwritable"})
        else:
            text = f"{self._folder}: can be written again; requests are answered"
            log.warning("%s", text, extra={"event": "written"})
        self._say(text)


def choose_loader(*, solo: bool) -> Callable[[Path, str], TrainedRun]:
    """Returns the function that loads a party's run. ``solo``: only the student is used."""
    return load_solo if solo else load_joint


@dataclass(frozen=True)
class ServingStanding:
    """The current state of a served run.

    ``present``: {peer: whether it is connected}. ``waiting``: the number of queued requests, at the
    active party.
    """

    present: Mapping[str, bool]
    waiting: int | None = None


@dataclass
class ServedTally:
    """The counts of a run since the program started.

    ``model``: the recipe's name. ``standing``: returns the run's current state; None while it is
    not served.
    """

    model: str
    run_id: str
    counts: Counts = field(default_factory=Counts)
    ledger: Ledger = field(default_factory=Ledger)
    standing: Callable[[], ServingStanding] | None = None


def list_attending(tallies: Mapping[str, ServedTally]) -> dict[str, list[str]]:
    """Returns {run id: the peers that are connected for it}."""
    standing = {
        run: tally.standing() for run, tally in tallies.items() if tally.standing is not None
    }
    return {run: [*filter(state.present.get, state.present)] for run, state in standing.items()}


def is_peer_missing(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether a peer that was connected for a run is not connected now.

    Runs that are no longer served do not count.
    """
    return any(set(peers) - set(now[run]) for run, peers in before.items() if run in now)


@dataclass(frozen=True)
class OpenedRun:
    """A run with its rows. ``approvals``: those of the guards, such as the grant."""

    files: PartyFiles
    trained: TrainedRun
    store: FeatureLookup
    tally: ServedTally
    approvals: Sequence[ServingApproval] = ()

    @property
    def run_id(self) -> str:
        """Returns the id of the run."""
        return self.trained.run_id

    @property
    def settings(self) -> ServeSettings:
        """Returns the ``serve`` section of the party file."""
        return self.files.file.serve

    @property
    def max_at_once(self) -> int:
        """Returns the maximum number of rows of a question. Its answer must fit into a message."""
        max_rows = _ANSWER_BYTES // get_row_bytes(self.store)
        return max(1, min(self.settings.max_batch, max_rows))

    def close(self) -> None:
        """Stops watching the table and writes the counts of bytes."""
        self.tally.standing = None
        self.store.close()
        for approval in self.approvals:
            approval.close()
        try:
            self.tally.ledger.save(self.trained.path / BYTES)
        except (OSError, VflError) as error:
            # The run's folder may have been deleted; the other runs continue.
            log.warning("%s: cannot be written (%s)", BYTES, error, extra={"event": "follow"})


class Opener:
    """Opens runs of one party.

    Args:
        path: The path of the party file.
        file: The settings of the party file, with replacements from the command line.
        runs: The runs that are served from the start. Only their parties may connect.
        device: Replaces the device of the party file.
        source: The table with the served ids; None: the table of the party file.
        solo: Whether the active party scores alone, with each run's student.

    Raises InputError if the party cannot serve these runs together.
    """

    def __init__(
        self,
        path: Path,
        file: PartyFile,
        runs: Sequence[TrainedRun],
        console: Console,
        device: str | None,
        source: str | None,
        *,
        solo: bool = False,
    ) -> None:
        self._path, self._file, self._console = path, file, console
        self._device, self._source, self.solo = device, source, solo
        recipes = [run.recipe for run in runs]
        self.active = recipes[0].active.name
        if others := [recipe for recipe in recipes if recipe.active.name != self.active]:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{others[0].name}: its active party is {others[0].active.name}, but that of "
                f"{recipes[0].name} is {self.active}. Serve each with a separate program.",
            )
        members = collect_members(*recipes, pins=file.pins)
        uses = BOTH if file.name == self.active else DIALS
        self.keyring = Keyring(file.tls, file.name, members, uses=uses, out=Path(file.out))
        self.passives = list(
            dict.fromkeys(party.name for recipe in recipes for party in recipe.passives)
        )
        self.servers = {recipe.server for recipe in recipes}
        # {run id: its counts}; the counts stay after the run has closed.
        self.tallies: dict[str, ServedTally] = {}
        # A student runs at this party alone, so nothing is sent.
        folder = folder_of(Path(file.record.folder or file.out), file.name)
        self._book = RecordBook(folder, file.name) if not solo else None
        self.disk = Disk(folder, lambda text: console.show("advice", said=text))
        # All runs share the guards. A student needs none.
        self._guards = make_serving_guards(file, self._book) if self._book is not None else []
        # {run id: the approvals with which the run was last opened}
        self._approvals: dict[str, Sequence[ServingApproval]] = {}

    def list_approvals(self) -> list[ServingApproval]:
        """Returns the approvals of all runs."""
        return [approval for approvals in self._approvals.values() for approval in approvals]

    def make_limits(self, run: str) -> list[PredictionsLeft]:
        """Returns the guards' limits on a passive party's answers."""
        return [PredictionsLeft(guard, self.active, run) for guard in self._guards]

    def make_record_writer(self, opened: OpenedRun, way: Sequence[str]) -> RecordMessage | None:
        """Returns a function that records sent messages, within the guards' limits.

        None if nothing is sent. Raises InputError if the record cannot be written. ``way``: see
        ``Recorder.leaves``.
        """
        if self._book is None:
            return None
        file = self._file
        recorder = Recorder(
            self._book,
            HeadExchange(self._book, self.keyring.current),
            RecordedRun(opened.run_id, 0, "serve", opened.trained.recipe.digest()),
            keys=file.pins,
            whole=file.record.digest == "whole",
            allows=list_leave_checks(self._guards),
        )
        return self.disk.note_failures(ServingRecord(recorder, way))

    def close(self) -> None:
        """Signs the record's head and closes the record."""
        if self._book is None:
            return
        try:
            HeadExchange(self._book, self.keyring.current).seal()
        except VflError as error:
            # The error that ends the program is more important.
            log.warning("%s", error, extra={"event": "record"})
        self._book.close()

    def load(self, folder: Path) -> OpenedRun:
        """Loads and opens a run. Raises InputError."""
        return self.open(choose_loader(solo=self.solo)(folder, self._file.name))

    def open(self, trained: TrainedRun) -> OpenedRun:
        """Reads the rows of a run and starts to watch the table. Raises InputError."""
        recipe = trained.recipe
        if recipe.active.name != self.active:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{trained.path}: its active party is {recipe.active.name}, but that of the served "
                f"runs is {self.active}. Restart this program to serve it.",
            )
        if more := {party.name for party in recipe.passives}.difference(self.passives):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{trained.path}: {list_names(sorted(more))} took no part in the served runs. "
                "Restart this program to serve it.",
            )
        files = read_files(self._path, device=self._device, recipe=recipe, keyring=self.keyring)
        words_of(files.file, recipe).serves()
        files = replace(files, file=self._file)
        require_served(trained)
        approvals = [
            approval
            for guard in self._guards
            if (approval := guard.approve(files, trained.path)) is not None
        ]
        self._approvals[trained.run_id] = approvals
        store = FeatureLookup(files, trained, self._console.show, self._source)
        store.watch()
        tally = self.tallies.setdefault(trained.run_id, ServedTally(recipe.name, trained.run_id))
        return OpenedRun(files, trained, store, tally, approvals)


_CHECK_S = 1.0


# Rows are counted before answers are sent, and the program stops within seconds after its grants
# have ended.
class GrantedRows:
    """Limits answers to the rows that a grant allows; a ``Limit``.

    ``run``: the id of the served run.
    """

    def __init__(self, approval: ServingApproval, run: str) -> None:
        self._approval, self._run = approval, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts answers as far as the grant allows; returns bool [N], the allowed ids."""
        return np.arange(len(ids)) < self._approval.take(self._run, len(ids))


class MinimumRows:
    """Refuses questions about fewer than ``min_ids`` different people; a ``Limit``."""

    def __init__(self, min_ids: int) -> None:
        self._min_rows = min_ids

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns bool [N]: all ids, or none. A repeated id counts once."""
        return np.full(len(ids), len(set(ids)) >= self._min_rows)


class PredictionsLeft:
    """Limits answers to those that a guard allows, such as the account; a ``Limit``.

    Answers count when they are written into the record. ``peer``: the party that asks. ``run``: the
    id of the served run.
    """

    def __init__(self, guard: ServingGuard, peer: str, run: str) -> None:
        self._guard, self._peer, self._run = guard, peer, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns bool [N]: the ids about which the guard allows an answer."""
        return self._guard.may_predict(ids, self._peer, self._run)


class GrantWatch:
    """Checks every second whether grants have ended; ends the program if all have.

    Args:
        approvals: Returns the grants of the served runs.
        failed: Receives the error that ends the program.
        say: Reports an event.
    """

    def __init__(
        self,
        approvals: Callable[[], Collection[ServingApproval]],
        failed: queue.SimpleQueue[BaseException],
        say: Callable[..., None],
    ) -> None:
        self._approvals, self._failed, self._say = approvals, failed, say
        self._reported = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grants", daemon=True)

    def watch(self) -> None:
        """Starts the thread that checks the grants."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_CHECK_S):
            try:
                self.look()
            except VflError as error:
                self._failed.put(error)
                return

    def look(self) -> None:
        """Reports ended grants. Raises InputError (REFUSED) if all grants have ended."""
        served = [approval for approval in self._approvals() if not approval.closed]
        reasons = [why for approval in served if (why := approval.why_over())]
        if reasons and len(reasons) == len(served):
            raise InputError(Code.REFUSED, reasons[0])
        for why in reasons:
            if why not in self._reported:
                self._reported.add(why)
                self._say("advice", said=why)
