"""A party's program and its grants: finds one that fits, counts what is used of it, and stops what
is not allowed any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vfl_common.config.party import PartyFile
from vfl_common.config.policy import PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_common.text import count
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.grants import peers
from vfl_party.grants.fits import GrantQuery, misfit, over
from vfl_party.grants.grant import Grant
from vfl_party.grants.store import GrantStore, KeptGrant, folder_of
from vfl_party.grants.table import digests
from vfl_party.policy.meeting import ProposedRun

# Phases of a prediction.
PREDICT, SERVE = "predict", "serve"
# A grant that was revoked ends what runs within this time.
_LOOK_S = 1.0
_SIGN = "Sign one with `vfl-party approve PARTY`, which shows what would leave."


def needs_grants(file: PartyFile) -> bool:
    """Whether a party runs nothing without a grant."""
    return isinstance(file.policy, PolicySettings) and file.policy.approval == "each"


def store_of(file: PartyFile) -> GrantStore:
    """Opens a party's grants, in the folder of its record. Raises InputError."""
    return GrantStore(folder_of(Path(file.record.folder or file.out), file.name), file.name)


def receivers(files: PartyFiles) -> list[str]:
    """Returns the receivers of a party: the server, and the parties that it exchanges with."""
    recipe = files.recipe
    others = (
        [passive.name for passive in recipe.passives] if files.is_active else [recipe.active.name]
    )
    return [recipe.server, *others]


def phases_of(files: PartyFiles) -> tuple[str, ...]:
    """Returns the names of the phases of a recipe."""
    return tuple(phase.name for phase in files.course.phases)


class Approval:
    """A grant that fits what a program is about to do; any thread may call it.

    Args:
        store: the party's grants.
        grant: the grant, with its envelope.
        asked: what is done.
    """

    def __init__(self, store: GrantStore, grant: KeptGrant, asked: GrantQuery) -> None:
        self._store, self.kept, self._asked = store, grant, asked
        self._looked_s, self.closed = 0.0, False
        # Runs that this program has begun, or resumes.
        self._begun = {asked.run}

    @property
    def grant(self) -> Grant:
        """The grant, without its envelope."""
        return self.kept.grant

    def why_over(self) -> str:
        """Returns why the grant has ended, in one sentence; '' if it has not. Raises InputError."""
        why = over(self.grant, self._store.uses(self.grant.grant), time.time())
        return f"the grant {self.grant.grant} of {self._store.name} {why}. {_SIGN}" if why else ""

    def goes_on(self) -> None:
        """Looks, at most once a second, whether the grant still holds. Raises InputError (REFUSED)
        if it has ended.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            if why := self.why_over():
                raise InputError(Code.REFUSED, why)

    def begins(self, run: str) -> None:
        """Counts a run that is about to begin, or go on: before anything of it leaves. Raises
        InputError (REFUSED) if the grant does not allow it.
        """
        asked, uses = replace(self._asked, run=run), self._store.uses(self.grant.grant)
        why = misfit(self.grant, asked, uses, time.time())
        if not why and self._asked.trains and run in uses.runs - self._begun:
            # The server chooses the id: one that was used before would cost nothing.
            why = f"was used for run {run}, which this party does not resume"
        if not why and self._asked.trains and not self._store.count_run(self.grant, run):
            # Another program of this party was faster.
            why = f"allows {count(self.grant.runs, 'run')}, and as many were begun"
        if why:
            raise _refuse(self._store.name, self.grant, why)
        self._begun.add(run)

    def takes(self, run: str, rows: int) -> None:
        """Counts rows that are about to be predicted jointly: all or none. Raises InputError
        (REFUSED) if the grant does not allow as many, or has ended.
        """
        if self.why_over() or self.take(run, rows, whole=True) < rows:
            raise self._short(rows)

    def take(self, run: str, rows: int, *, whole: bool = False) -> int:
        """Counts rows that are about to be predicted by a served run; returns how many the grant
        still allows. Raises InputError. ``whole``: all or none.
        """
        if time.time() >= self.grant.ends_s:
            return 0
        return self._store.take_rows(self.grant, run, rows, whole=whole)

    def takes_all(self, run: str, rows: int) -> None:
        """As ``take``, all or none. Raises InputError (REFUSED) if it is none."""
        if rows and not self.take(run, rows, whole=True):
            raise self._short(rows)

    def _short(self, rows: int) -> InputError:
        uses = self._store.uses(self.grant.grant)
        left = count(max(0, self.grant.predictions - uses.predictions), "predicted row")
        why = over(self.grant, uses, time.time())
        return _refuse(
            self._store.name, self.grant, why or f"has {left} left, which is too few for {rows:,}"
        )

    def close(self) -> None:
        """Ends the use of the grant."""
        self.closed = True
        self._store.close()


def to_train(files: PartyFiles, opened: OpenedParty, resume: RunFolder | None) -> Approval | None:
    """Finds the grant for a training run; None if the party needs none.

    ``resume``: the unfinished run that is offered. Raises InputError (REFUSED) if no grant fits.
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
        return _find(store, files, asked)


def to_predict(files: PartyFiles, digest: str, phase: str) -> Approval | None:
    """Finds the grant for predictions with a trained run; None if the party needs none.

    Args:
        files: the party's, with the recipe of the run.
        digest: of the recipe with which the run was trained.
        phase: ``predict``, or ``serve``, in which the server has no part.

    Raises InputError (REFUSED) if no grant fits.
    """
    if not needs_grants(files.file):
        return None
    if phase == SERVE and files.file.serve.cache_s and not files.is_active:
        raise InputError(
            Code.CONFIG_INVALID,
            "serve.cache_s: an embedding that the active party keeps is not counted against a "
            f"grant (got {files.file.serve.cache_s:g}). Set cache_s = 0.",
        )
    names = receivers(files)
    if phase == SERVE:
        names.remove(files.recipe.server)
    asked = GrantQuery(digest, _get_pins(files, names), (phase,), trains=False)
    with _open_store(files) as store:
        return _find(store, files, asked)


def get_trained_digest(folder: Path) -> str:
    """Returns the digest of the recipe of the run in a party's folder, which may have had more
    parties than the prediction. Raises InputError.
    """
    facts = RunFolder(folder, folder.resolve().parent.name).facts()
    return str(facts.get("recipe_digest", ""))


class GrantGuard:
    """The grants of one program in a federation: what it shows, and what the others show it. See
    ``vfl_party.policy.meeting.RunGuard``.

    Args:
        files: the party's.
        resume: the unfinished run that is offered.
        trained: the party's folder of the run to predict with; None in training.
    """

    key = "grant"

    def __init__(
        self, files: PartyFiles, *, resume: RunFolder | None = None, trained: Path | None = None
    ) -> None:
        self._files, self._resume, self._trains = files, resume, trained is None
        self._digest = files.recipe.digest() if trained is None else get_trained_digest(trained)
        self._approval: Approval | None = None
        self._others: Mapping[str, KeptGrant] = {}
        self._run = ""
        # Runs that this program has begun, or resumes.
        self._begun = {resume.run_id} if resume is not None else set[str]()
        # The ids that are counted as predicted in the run.
        self._predicted: set[str] = set()

    def before(self, proposed: ProposedRun) -> None:
        """Finds the grant. Raises InputError (REFUSED) if the party needs one, and none fits."""
        self._approval = (
            to_train(self._files, proposed.opened, self._resume)
            if self._trains
            else to_predict(self._files, self._digest, PREDICT)
        )

    def shows(self) -> dict[str, Any] | None:
        """Returns the grant for all parties; None if this party needs none."""
        if self._approval is None:
            return None
        return peers.present(self._approval.kept, self._files.keyring.current())

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """Checks the grants that the others show. Raises PeerError at the first that does not
        fit.
        """
        if run_id != self._run:
            self._run, self._predicted = run_id, set()
        goes_on = run_id in self._begun
        joined = peers.Joined(self._digest, run_id, self._trains, goes_on)
        credentials = self._files.keyring.current()
        with self._store(tables) as store:
            seen = store.list_runs_shown if store is not None else _get_no_runs
            self._others = peers.check_grants(tables, joined, credentials, seen)
        self._begun.add(run_id)

    def begins(self, folder: RunFolder) -> list[str]:
        """Counts the run, before anything of it leaves. Returns a sentence for the grant of each
        party. Raises InputError (REFUSED).
        """
        grants = dict(self._others)
        if self._approval is not None:
            self._approval.begins(folder.run_id)
            grants[self._files.name] = self._approval.kept
        if grants:
            # What `vfl-party grants --verify` compares.
            folder.note(grants_for=self._digest)
        return [
            f"{party} has allowed {grant.grant} (grant {grant.grant.grant})"
            for party, grant in grants.items()
        ]

    def count_use(self, ids: Sequence[str]) -> None:
        """Counts what is used, once it is known which rows all hold: nothing of them has left yet.
        Raises InputError (REFUSED) if the grant does not allow as many predictions.

        A run that begins again may have other rows: peers choose theirs.
        """
        with self._store(self._others) as store:
            if store is not None and self._trains:
                # Only now they take part in the run for certain.
                for grant in self._others.values():
                    store.see(grant.grant, self._run)
        if self._approval is not None and not self._trains:
            new = set(ids) - self._predicted
            self._approval.takes(self._run, len(new))
            self._predicted |= new

    def goes_on(self) -> None:
        """See ``Approval.goes_on``."""
        if self._approval is not None:
            self._approval.goes_on()

    @contextlib.contextmanager
    def _store(self, tables: Mapping[str, Any]) -> Iterator[GrantStore | None]:
        """Yields the store, to count what peers show; None if they show nothing: then none is made
        for a party that needs no grants itself.
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
    """Yields the party's grants; closes them if the block fails."""
    store = store_of(files.file)
    try:
        yield store
    except BaseException:
        store.close()
        raise


def _find(store: GrantStore, files: PartyFiles, asked: GrantQuery) -> Approval:
    """Returns the newest grant that fits, first of all the one of the run that is resumed."""
    known = [(grant, store.uses(grant.grant.grant)) for grant in store.all(files.keyring.current())]
    known.sort(key=lambda grant: asked.run not in grant[1].runs)
    now_s, last = time.time(), None
    for grant, uses in known:
        why = misfit(grant.grant, asked, uses, now_s)
        if not why:
            return Approval(store, grant, asked)
        if last is None and grant.grant.digest == asked.digest:
            last = grant.grant, why
    if last is not None:
        raise _refuse(store.name, *last)
    raise InputError(
        Code.REFUSED,
        f'policy.approval is "each", and {store.name} has signed no grant for recipe '
        f"{files.recipe.name} with digest {asked.digest}. {_SIGN}",
    )


def _refuse(name: str, grant: Grant, why: str) -> InputError:
    return InputError(
        Code.REFUSED,
        f'policy.approval is "each", and the grant {grant.grant} of {name} {why}. {_SIGN}',
    )
