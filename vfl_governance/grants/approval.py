"""Finds a grant for what a party's program is about to do, and counts the uses of the grant.

If the grant ends, for example because it is revoked, the program stops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vfl_common.config.party import PartyFile
from vfl_common.config.policy import PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder, find_unfinished
from vfl_common.text import count
from vfl_governance.grants import store as peers
from vfl_governance.grants.store import Grant, GrantStore, KeptGrant, Uses, digests, folder_of
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.policy.guards import InstalledGuard, ServingGuard
from vfl_party.policy.meeting import ProposedRun
from vfl_party.record.book import RecordBook

# The names in a grant that allow joint predictions and serving.
PREDICT, SERVE = "predict", "serve"
# The interval between two checks whether a grant has been revoked.
_CHECK_INTERVAL_S = 1.0
_SIGN = "Sign one with `vfl-party approve PARTY`, which shows what would leave."


def needs_grants(file: PartyFile) -> bool:
    """Returns whether a party needs a grant for each run."""
    return isinstance(file.policy, PolicySettings) and file.policy.approval == "each"


def store_of(file: PartyFile) -> GrantStore:
    """Opens the store of a party's grants. Raises InputError if it cannot be used."""
    return GrantStore(folder_of(Path(file.record.folder or file.out), file.name), file.name)


def receivers(files: PartyFiles) -> list[str]:
    """Returns the names of a party's receivers: the server and the parties that get its data."""
    recipe = files.recipe
    others = (
        [passive.name for passive in recipe.passives] if files.is_active else [recipe.active.name]
    )
    return [recipe.server, *others]


def phases_of(files: PartyFiles) -> tuple[str, ...]:
    """Returns the names of the phases of a recipe."""
    return tuple(phase.name for phase in files.course.phases)


class Approval:
    """A grant for what a program is about to do. Any thread may call it.

    Args:
        store: The store of the party's grants.
        grant: The grant with its envelope.
        asked: What the program is about to do.
    """

    def __init__(self, store: GrantStore, grant: KeptGrant, asked: GrantQuery) -> None:
        self._store, self.kept, self._asked = store, grant, asked
        self._checked_s, self.closed = 0.0, False
        # The runs that this program has begun or resumes.
        self._begun = {asked.run}

    @property
    def grant(self) -> Grant:
        """The grant, without its envelope."""
        return self.kept.grant

    def why_over(self) -> str:
        """Returns a sentence why the grant has ended, or '' if it has not.

        Raises InputError if the store cannot be read.
        """
        why = over(self.grant, self._store.uses(self.grant.grant), time.time())
        return f"the grant {self.grant.grant} of {self._store.name} {why}. {_SIGN}" if why else ""

    def goes_on(self) -> None:
        """Raises InputError (REFUSED) if the grant has ended. Checks at most once a second."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _CHECK_INTERVAL_S:
            self._checked_s = now_s
            if why := self.why_over():
                raise InputError(Code.REFUSED, why)

    def begins(self, run: str) -> None:
        """Counts a run that is about to begin or to be resumed, before anything is sent.

        Raises InputError (REFUSED) if the grant does not allow the run.
        """
        asked, uses = replace(self._asked, run=run), self._store.uses(self.grant.grant)
        why = misfit(self.grant, asked, uses, time.time())
        if not why and self._asked.trains and run in uses.runs - self._begun:
            # The server chooses the id of a run. Using an old id again would not be counted.
            why = f"was used for run {run}, which this party does not resume"
        if not why and self._asked.trains and not self._store.count_run(self.grant, run):
            # Another program of this party has just used the last run of the grant.
            why = f"allows {count(self.grant.runs, 'run')}, and this number of runs has begun"
        if why:
            raise _refuse(self._store.name, self.grant, why)
        self._begun.add(run)

    def takes(self, run: str, rows: int) -> None:
        """Counts rows before they are predicted jointly, either all rows or none.

        Raises InputError (REFUSED) if the grant does not allow this many, or has ended.
        """
        if self.why_over() or self.take(run, rows, whole=True) < rows:
            raise self._too_few_error(rows)

    def take(self, run: str, rows: int, *, whole: bool = False) -> int:
        """Counts rows before a served model predicts them, as far as the grant allows them.

        Returns the number of counted rows. ``whole``: Count either all rows or none. Raises
        InputError if the store cannot be used.
        """
        if time.time() >= self.grant.ends_s:
            return 0
        return self._store.take_rows(self.grant, run, rows, whole=whole)

    def takes_all(self, run: str, rows: int) -> None:
        """Counts rows before a served model predicts them, either all rows or none.

        Raises InputError (REFUSED) if the grant does not allow this many.
        """
        if rows and not self.take(run, rows, whole=True):
            raise self._too_few_error(rows)

    def _too_few_error(self, rows: int) -> InputError:
        uses = self._store.uses(self.grant.grant)
        rows_left = count(max(0, self.grant.predictions - uses.predictions), "predicted row")
        why = over(self.grant, uses, time.time())
        return _refuse(
            self._store.name,
            self.grant,
            why or f"has {rows_left} left, which is too few for {rows:,}",
        )

    def close(self) -> None:
        """Closes the store of grants."""
        self.closed = True
        self._store.close()


def to_train(files: PartyFiles, opened: OpenedParty, resume: RunFolder | None) -> Approval | None:
    """Finds the grant for a training run, or returns None if the party needs no grant.

    ``resume``: The unfinished run that the party offers to resume. Raises InputError (REFUSED) if
    no grant allows the run.
    """
    if not needs_grants(files.file):
        return None
    with _open_store(files) as store:
        asked = GrantQuery(
            files.recipe.digest(),
            _get_pins(files, receivers(files)),
            phases_of(files),
            table=digests(opened, store.secret),
            run=resume.run_id if resume is not None else "",
        )
        return _find_approval(store, files, asked)


def to_predict(files: PartyFiles, digest: str, phase: str) -> Approval | None:
    """Finds the grant for predictions with a trained run, or returns None if none is needed.

    Args:
        files: The party's files, with the recipe of the run.
        digest: The digest of the recipe with which the run was trained.
        phase: ``predict``, or ``serve``, in which the server takes no part.

    Raises InputError (REFUSED) if no grant allows the predictions.
    """
    if not needs_grants(files.file):
        return None
    if phase == SERVE and files.file.serve.cache_s and not files.is_active:
        raise InputError(
            Code.CONFIG_INVALID,
            "serve.cache_s: must be 0 with policy.approval, because the use of a cached embedding "
            f"cannot be counted (got {files.file.serve.cache_s:g}). Set cache_s = 0.",
        )
    names = receivers(files)
    if phase == SERVE:
        names.remove(files.recipe.server)
    asked = GrantQuery(digest, _get_pins(files, names), (phase,), trains=False)
    with _open_store(files) as store:
        return _find_approval(store, files, asked)


def get_trained_digest(folder: Path) -> str:
    """Returns the digest of the recipe with which a run was trained.

    A prediction may have fewer parties than this recipe. ``folder``: The party's folder of the run.
    Raises InputError if the folder cannot be read.
    """
    facts = RunFolder(folder, folder.resolve().parent.name).facts()
    return str(facts.get("recipe_digest", ""))


def make_run_guard(
    files: PartyFiles, _book: RecordBook, *, resume: RunFolder | None, trained: Path | None
) -> GrantGuard:
    """Returns the guard of a run. A party that needs no grant checks those of its peers."""
    return GrantGuard(files, resume=resume, trained=trained)


def make_check_guard(files: PartyFiles) -> GrantCheck | None:
    """Returns the guard of ``vfl-party check``, or None if the party needs no grant."""
    return GrantCheck(files) if needs_grants(files.file) else None


def make_serving_guard(file: PartyFile, _book: RecordBook) -> GrantServing | None:
    """Returns the guard of a program that serves, or None if the party needs no grant."""
    return GrantServing() if needs_grants(file) else None


class GrantServing(ServingGuard):
    """Finds the grants of served runs."""

    def approve(self, files: PartyFiles, trained: Path) -> Approval | None:
        """Finds the grant for a run. Raises InputError (REFUSED) if there is none."""
        return to_predict(files, get_trained_digest(trained), SERVE)


class GrantCheck(InstalledGuard):
    """Reports the grant that allows the party's next training run."""

    key = "grant"

    def __init__(self, files: PartyFiles) -> None:
        self._files = files

    def findings(self, opened: OpenedParty) -> Iterator[tuple[str, str]]:
        """Yields the grant. Raises InputError (REFUSED) if there is none."""
        files = self._files
        # A resumed run is not counted again.
        resume = find_unfinished(Path(files.file.out), files.name, files.recipe)
        approval = to_train(files, opened, resume)
        if approval is not None:
            approval.close()
            yield "grant", f"{approval.grant.grant} allows {approval.grant}"


class GrantGuard(InstalledGuard):
    """Sends this party's grant to the other parties, and checks their grants.

    Args:
        files: The party's files.
        resume: The unfinished run that the party offers to resume.
        trained: The party's folder of the run to predict with, or None for training.
    """

    key = "grant"

    def __init__(
        self, files: PartyFiles, *, resume: RunFolder | None = None, trained: Path | None = None
    ) -> None:
        self._files, self._resume, self._trains = files, resume, trained is None
        self._digest = files.recipe.digest() if trained is None else get_trained_digest(trained)
        self._approval: Approval | None = None
        self._peer_grants: Mapping[str, KeptGrant] = {}
        self._run = ""
        # The runs that this program has begun or resumes.
        self._begun = {resume.run_id} if resume is not None else set[str]()
        # The ids that have been counted as predictions of the run.
        self._predicted: set[str] = set()

    def before(self, proposed: ProposedRun) -> None:
        """Finds the grant. Raises InputError (REFUSED) if the party needs a grant and has none."""
        self._approval = (
            to_train(self._files, proposed.opened, self._resume)
            if self._trains
            else to_predict(self._files, self._digest, PREDICT)
        )

    def shows(self) -> dict[str, Any] | None:
        """Returns this party's grant for all parties, or None if the party needs no grant."""
        if self._approval is None:
            return None
        return peers.present(self._approval.kept, self._files.keyring.current())

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """Checks the grants of the other parties. Raises PeerError at the first invalid grant."""
        if run_id != self._run:
            self._run, self._predicted = run_id, set()
        is_resumed = run_id in self._begun
        joined = peers.Joined(self._digest, run_id, self._trains, is_resumed)
        credentials = self._files.keyring.current()
        with self._store(tables) as store:
            list_seen_runs = store.list_runs_shown if store is not None else _get_no_runs
            self._peer_grants = peers.check_grants(tables, joined, credentials, list_seen_runs)
        self._begun.add(run_id)

    def begins(self, folder: RunFolder) -> list[str]:
        """Counts the run before anything is sent. Returns a sentence for each party's grant.

        Raises InputError (REFUSED) if the grant does not allow the run.
        """
        grants = dict(self._peer_grants)
        if self._approval is not None:
            self._approval.begins(folder.run_id)
            grants[self._files.name] = self._approval.kept
        if grants:
            # `vfl-party grants --verify` compares this digest.
            folder.note(grants_for=self._digest)
        return [
            f"{party} has allowed {grant.grant} (grant {grant.grant.grant})"
            for party, grant in grants.items()
        ]

    def count_use(self, ids: Sequence[str]) -> None:
        """Counts the uses of the grants after the entity alignment, before values are sent.

        A restarted prediction may have other rows, because peers choose their rows, so only new ids
        are counted. Raises InputError (REFUSED) if the grant does not allow this many predictions.
        """
        with self._store(self._peer_grants) as store:
            if store is not None and self._trains:
                # Only now is it certain that the other parties take part in the run.
                for grant in self._peer_grants.values():
                    store.see(grant.grant, self._run)
        if self._approval is not None and not self._trains:
            new = set(ids) - self._predicted
            self._approval.takes(self._run, len(new))
            self._predicted |= new

    def goes_on(self) -> None:
        """Raises InputError (REFUSED) if this party's grant has ended."""
        if self._approval is not None:
            self._approval.goes_on()

    @contextlib.contextmanager
    def _store(self, tables: Mapping[str, Any]) -> Iterator[GrantStore | None]:
        """Yields the store for counting the peers' grants, or None if the peers have no grants.

        So a party that needs no grants creates a store only if a peer has one.
        """
        if not any(words for party, words in tables.items() if party != self._files.name):
            yield None
            return
        store = store_of(self._files.file)
        try:
            yield store
        finally:
            store.close()


def _get_no_runs(_party: str, _grant: str) -> frozenset[str]:
    return frozenset()


def _get_pins(files: PartyFiles, names: Sequence[str]) -> dict[str, str]:
    return {name: files.file.pins.get(name, "") for name in names}


@contextlib.contextmanager
def _open_store(files: PartyFiles) -> Iterator[GrantStore]:
    """Yields the store of the party's grants, and closes it only if the block raises an error."""
    store = store_of(files.file)
    try:
        yield store
    except BaseException:
        store.close()
        raise


def _find_approval(store: GrantStore, files: PartyFiles, asked: GrantQuery) -> Approval:
    """Returns the newest grant that allows ``asked``.

    A grant that was already used for the resumed run has priority. Raises InputError (REFUSED) if
    there is none.
    """
    grants_with_uses = [
        (grant, store.uses(grant.grant.grant)) for grant in store.all(files.keyring.current())
    ]
    grants_with_uses.sort(key=lambda grant: asked.run not in grant[1].runs)
    now_s, first_misfit = time.time(), None
    for grant, uses in grants_with_uses:
        why = misfit(grant.grant, asked, uses, now_s)
        if not why:
            return Approval(store, grant, asked)
        if first_misfit is None and grant.grant.digest == asked.digest:
            first_misfit = grant.grant, why
    if first_misfit is not None:
        raise _refuse(store.name, *first_misfit)
    raise InputError(
        Code.REFUSED,
        f'policy.approval is "each", but {store.name} has signed no grant for recipe '
        f"{files.recipe.name} with digest {asked.digest}. {_SIGN}",
    )


def _refuse(name: str, grant: Grant, why: str) -> InputError:
    return InputError(
        Code.REFUSED,
        f'policy.approval is "each", but the grant {grant.grant} of {name} {why}. {_SIGN}',
    )


@dataclass(frozen=True)
class GrantQuery:
    """What a program is about to do and needs a grant for.

    Args:
        digest: The digest of the recipe.
        peers: {receiver: pin of its key}.
        phases: The names of the phases.
        trains: Whether the program trains. Otherwise it predicts.
        table: The digests of the table's columns and ids. None for predictions of other rows.
        run: The id of the run to train, or '' if it is not known yet.
    """

    digest: str
    peers: Mapping[str, str]
    phases: Collection[str]
    trains: bool = True
    table: tuple[str, str] | None = None
    run: str = ""


def over(grant: Grant, uses: Uses, now_s: float) -> str:
    """Returns the reason why a grant has ended, or '' if it is still valid."""
    if uses.revoked_s is not None:
        return f"was revoked{f' ({uses.why})' if uses.why else ''}"
    if now_s >= grant.ends_s:
        return f"was valid until the end of {grant.until} (UTC)"
    return ""


def misfit(grant: Grant, asked: GrantQuery, uses: Uses, now_s: float) -> str:
    """Returns the reason why a grant does not allow ``asked``, or '' if the grant allows it."""
    if grant.digest != asked.digest:
        return f"is for a recipe with digest {grant.digest}, not {asked.digest}"
    return (
        over(grant, uses, now_s)
        or _check_table(grant, asked)
        or _check_peers(grant, asked)
        or _check_phases(grant, asked)
        or _check_uses(grant, asked, uses)
    )


def _check_table(grant: Grant, asked: GrantQuery) -> str:
    if asked.table is None:
        return ""
    columns, ids = asked.table
    if columns != grant.columns:
        return "is for a table with other columns"
    return "is for a table with other ids" if ids != grant.ids else ""


def _check_peers(grant: Grant, asked: GrantQuery) -> str:
    for name, pin in asked.peers.items():
        allowed = grant.peers.get(name)
        if allowed is None:
            return f"does not name {name}, which would receive values"
        if allowed != pin:
            return f"is for the key {allowed[:23]} of {name}, but {pin[:23] or 'none'} is pinned"
    return ""


def _check_phases(grant: Grant, asked: GrantQuery) -> str:
    missing_phases = [phase for phase in asked.phases if phase not in grant.phases]
    return f"does not allow the phase {missing_phases[0]}" if missing_phases else ""


def _check_uses(grant: Grant, asked: GrantQuery, uses: Uses) -> str:
    if asked.trains:
        if asked.run in uses.runs or len(uses.runs) < grant.runs:
            return ""
        return f"allows {count(grant.runs, 'run')}{_render_uses(len(uses.runs), 'begun')}"
    if uses.predictions < grant.predictions:
        return ""
    rows = count(grant.predictions, "predicted row")
    return f"allows {rows}{_render_uses(uses.predictions, 'predicted')}"


def _render_uses(number: int, what: str) -> str:
    if not number:
        return ""
    return f", and {number:,} {'was' if number == 1 else 'were'} {what}"
