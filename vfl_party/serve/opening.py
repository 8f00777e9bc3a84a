"""Opens the runs that a party serves: each with its rows, its counts and its ledger."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vfl_common.config.party import PartyFile, ServeSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import require_writable
from vfl_common.identity.credentials import BOTH, DIALS
from vfl_common.identity.keyring import Keyring
from vfl_common.identity.members import members_of
from vfl_common.ledger import Ledger
from vfl_common.process.logs import Console
from vfl_common.rpc.serving.answered import OutgoingMessage, RecordMessage
from vfl_common.text import list_names
from vfl_party.account.limits import guard_of, limits_of
from vfl_party.assembly.files import PartyFiles, read_files
from vfl_party.grants.approval import SERVE, Approval, get_trained_digest, to_predict
from vfl_party.policy.guards import words_of
from vfl_party.predict.alone import load_solo
from vfl_party.predict.prediction import TrainedRun, load_joint
from vfl_party.record.book import RecordBook, folder_of
from vfl_party.record.heads import HeadExchange
from vfl_party.record.recorder import RecordedRun, Recorder, ServingRecord
from vfl_party.serve.counts import Counts
from vfl_party.serve.granted import PredictionsLeft
from vfl_party.serve.kinds.choice import bytes_of_row
from vfl_party.serve.store import FeatureLookup, require_served

# Limit of an answer; a gRPC message can have twice as many.
_ANSWER_BYTES = 2 << 20
# In the party's folder of the run: the bytes of the last time that it was served.
BYTES = "serve-bytes.json"

log = logging.getLogger(__name__)


class Disk:
    """Notes whether the last write has failed; any thread may ask.

    Args:
        folder: of the record.
        say: shows a sentence to the person here, once per failure.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._lock, self._failed = threading.Lock(), False

    def note_failures(self, write: RecordMessage) -> RecordMessage:
        """Returns ``write``, with its failures noted."""

        def write_watched(outgoing: OutgoingMessage) -> None:
            try:
                write(outgoing)
            except VflError as error:
                # The account or a grant refuses with another code.
                if error.code is Code.FILE_INVALID:
                    self._note(error)
                raise
            # A short line may have found room where the next one does not.
            self.ready()

        return write_watched

    def ready(self) -> bool:
        """Whether the record can be written. After a failure this writes a file for a trial: a
        caller that waits for readiness sends nothing that is recorded.
        """
        if self._failed:
            with contextlib.suppress(VflError):
                require_writable(self._folder)
                self._note(None)
        return not self._failed

    def _note(self, error: VflError | None) -> None:
        with self._lock:
            before, self._failed = self._failed, error is not None
        if before == (error is not None):
            return
        if error is not None:
            text = f"{error} No request is answered until then."
            log.error("%s", text, extra={"event": "unwritable"})
        else:
            text = f"{self._folder}: can be written again; requests are answered"
            log.warning("%s", text, extra={"event": "written"})
        self._say(text)


def choose_loader(*, solo: bool) -> Callable[[Path, str], TrainedRun]:
    """Returns what loads a run of a party. ``solo``: for the student alone."""
    return load_solo if solo else load_joint


@dataclass(frozen=True)
class ServingStanding:
    """How a run that is served stands. ``present``: {peer: whether it attends}; ``waiting``:
    requests in the queue, at the active party.
    """

    present: Mapping[str, bool]
    waiting: int | None = None


@dataclass
class ServedTally:
    """What is counted of a run, from the program's start on. ``model``: the recipe's name.
    ``standing``: returns how it stands now; None while it is not served.
    """

    model: str
    run_id: str
    counts: Counts = field(default_factory=Counts)
    ledger: Ledger = field(default_factory=Ledger)
    standing: Callable[[], ServingStanding] | None = None


def list_attending(tallies: Mapping[str, ServedTally]) -> dict[str, list[str]]:
    """Returns {run id: the peers that attend it now}."""
    standing = {
        run: tally.standing() for run, tally in tallies.items() if tally.standing is not None
    }
    return {run: [*filter(state.present.get, state.present)] for run, state in standing.items()}


def is_peer_missing(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> bool:
    """Whether a peer that attended a run does not attend it now. A run that is not served any more
    misses nobody.
    """
    return any(set(peers) - set(now[run]) for run, peers in before.items() if run in now)


@dataclass(frozen=True)
class Opened:
    """A run with its rows, as it is served. ``approval``: the grant that allows it; None if the
    party needs none.
    """

    files: PartyFiles
    trained: TrainedRun
    store: FeatureLookup
    tally: ServedTally
    approval: Approval | None = None

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
        """The most rows of a question: its answers must fit into a message."""
        max_rows = _ANSWER_BYTES // bytes_of_row(self.store)
        return max(1, min(self.settings.max_batch, max_rows))

    def close(self) -> None:
        """Looks at the table no longer, and keeps the bytes that were counted."""
        self.tally.standing = None
        self.store.close()
        if self.approval is not None:
            self.approval.close()
        try:
            self.tally.ledger.save(self.trained.path / BYTES)
        except (OSError, VflError) as error:
            # Somebody may have removed the run; the other runs go on.
            log.warning("%s: cannot be written (%s)", BYTES, error, extra={"event": "follow"})


class Opener:
    """Opens runs of one party.

    Args:
        path: of the party file.
        file: what it says, with what the command line replaces in it.
        runs: those that are served from the start: whoever has a part in them may connect.
        device: replaces the file's.
        source: of the table with the people who may be asked for; None: the party file's.
        solo: whether the active party scores by itself, with each run's student.

    Raises InputError if the party cannot serve these together.
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
        members = members_of(*recipes, pins=file.pins)
        uses = BOTH if file.name == self.active else DIALS
        self.keyring = Keyring(file.tls, file.name, members, uses=uses, out=Path(file.out))
        self.passives = list(
            dict.fromkeys(party.name for recipe in recipes for party in recipe.passives)
        )
        self.servers = {recipe.server for recipe in recipes}
        # {run id: what was counted of it}; it outlives the run.
        self.tallies: dict[str, ServedTally] = {}
        # A student asks nobody, and nothing leaves.
        folder = folder_of(Path(file.record.folder or file.out), file.name)
        self._book = RecordBook(folder, file.name) if not solo else None
        self.disk = Disk(folder, lambda text: console.show("advice", said=text))
        # All runs share one account.
        self._account = guard_of(self._book, limits_of(file)) if self._book is not None else None
        # {run id: the grant with which it was opened last}.
        self.approvals: dict[str, Approval] = {}

    def make_account_limit(self, run: str) -> PredictionsLeft | None:
        """Returns the limit of a passive party's answers by its account; None without limits."""
        return PredictionsLeft(self._account, self.active, run) if self._account else None

    def make_record_writer(self, opened: Opened, way: Sequence[str]) -> RecordMessage | None:
        """Returns what writes into the party's record what leaves while a run is served, held to
        the account's limits; None if nothing leaves. Raises InputError if it cannot be written.

        ``way``: see ``Recorder.leaves``.
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
            allows=self._account,
        )
        return self.disk.note_failures(ServingRecord(recorder, way))

    def close(self) -> None:
        """Signs the head of the record, and closes it."""
        if self._book is None:
            return
        try:
            HeadExchange(self._book, self.keyring.current).seal()
        except VflError as error:
            # Why the program ends says more.
            log.warning("%s", error, extra={"event": "record"})
        self._book.close()

    def load(self, folder: Path) -> Opened:
        """Loads a run, and opens it. Raises InputError."""
        return self.open(choose_loader(solo=self.solo)(folder, self._file.name))

    def open(self, trained: TrainedRun) -> Opened:
        """Reads the rows of a run, and looks from now on whether the table changes. Raises
        InputError.
        """
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
        # A student asks nobody.
        approval = (
            to_predict(files, get_trained_digest(trained.path), SERVE) if not self.solo else None
        )
        if approval is not None:
            self.approvals[trained.run_id] = approval
        store = FeatureLookup(files, trained, self._console.show, self._source)
        store.watch()
        tally = self.tallies.setdefault(trained.run_id, ServedTally(recipe.name, trained.run_id))
        return Opened(files, trained, store, tally, approval)
