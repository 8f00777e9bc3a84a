"""Creates the guards of a party, which may refuse a run before anything is sent.

Other packages add guards as entry points of the group ``vfl.guards``: each is a ``GuardFactory``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vfl_common.config.party import PartyFile, TreeLimits
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.outbound.policies import get_trial_policy_name
from vfl_party.policy.meeting import ProposedRun, RunGuard
from vfl_party.policy.words import WordsGuard
from vfl_party.record.book import RecordBook
from vfl_party.record.recorder import LeaveCheck

_GROUP = "vfl.guards"


class InstalledGuard(RunGuard):
    """A guard of an installed package, which may also follow the run. Each method does nothing
    unless a subclass overrides it.
    """

    def before(self, asked: ProposedRun) -> None:
        """See ``RunGuard``."""

    def shows(self) -> Any:
        """See ``RunGuard``."""
        return None

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """See ``RunGuard``."""

    def begins(self, folder: RunFolder) -> Sequence[str]:  # noqa: ARG002 - for subclasses
        """Is called in each generation before anything is sent. Returns sentences for the
        operator.

        Raises InputError (REFUSED) to refuse the run.
        """
        return ()

    def count_use(self, ids: Sequence[str]) -> None:
        """Is called with the ids of the aligned rows before values about them are sent. May raise
        InputError (REFUSED).
        """

    def goes_on(self) -> None:
        """Is called in each step. Raises InputError (REFUSED) to end the run."""

    @property
    def leave_check(self) -> LeaveCheck | None:
        """The check of each bundle before it is sent, or None."""
        return None

    def findings(self, opened: OpenedParty) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        """Yields (subject, text) lines of ``vfl-party check``. May raise InputError (REFUSED)."""
        yield from ()


class ServingApproval(Protocol):
    """Allows a program to serve one run. Any thread may call it.

    ``closed``: Whether the run is no longer served.
    """

    closed: bool

    def why_over(self) -> str:
        """Returns a sentence why the approval has ended, or '' if it has not."""
        ...

    def take(self, run: str, rows: int) -> int:
        """Counts rows before they are predicted, as far as they are allowed. Returns their
        number.
        """
        ...

    def takes_all(self, run: str, rows: int) -> None:
        """Counts all rows before they are predicted. Raises InputError (REFUSED) if they are too
        many.
        """
        ...

    def close(self) -> None:
        """Ends the use of the approval."""
        ...


class ServingGuard:
    """Guards a program that serves. All its runs share the guard. Each method allows everything
    unless a subclass overrides it.
    """

    @property
    def leave_check(self) -> LeaveCheck | None:
        """The check of each answer before it is sent, or None."""
        return None

    def approve(self, files: PartyFiles, trained: Path) -> ServingApproval | None:  # noqa: ARG002
        """Returns the approval to serve the run in the folder ``trained``; None if none is needed.
        Raises InputError (REFUSED).
        """
        return None

    def may_predict(
        self,
        ids: Sequence[str],
        peer: str,  # noqa: ARG002
        run: str,  # noqa: ARG002
    ) -> npt.NDArray[np.bool_]:
        """Returns for each id whether a peer may get an answer, bool [N]."""
        return np.ones(len(ids), bool)


class GuardFactory(Protocol):
    """Makes the guards of one kind, or None if a party file needs none. Each raises InputError if
    the guard cannot be made.
    """

    def make_run_guard(
        self, files: PartyFiles, book: RecordBook, *, resume: RunFolder | None, trained: Path | None
    ) -> InstalledGuard | None:
        """Makes the guard of a run. ``resume``: The unfinished run that the party offers to resume.
        ``trained``: The party's folder of the run to predict with, or None for training.
        """
        ...

    def make_check_guard(self, files: PartyFiles) -> InstalledGuard | None:
        """Makes the guard of ``vfl-party check``, which creates no files."""
        ...

    def make_serving_guard(self, file: PartyFile, book: RecordBook) -> ServingGuard | None:
        """Makes the guard of a program that serves."""
        ...


def make_run_guards(
    files: PartyFiles, book: RecordBook, *, resume: RunFolder | None, trained: Path | None
) -> list[InstalledGuard]:
    """Makes the guards of a run, as ``GuardFactory.make_run_guard``."""
    guards = [
        factory.make_run_guard(files, book, resume=resume, trained=trained)
        for factory in load_factories(files.file)
    ]
    return [guard for guard in guards if guard is not None]


def make_check_guards(files: PartyFiles) -> list[InstalledGuard]:
    """Makes the guards of ``vfl-party check``, as ``GuardFactory.make_check_guard``."""
    guards = [factory.make_check_guard(files) for factory in load_factories(files.file)]
    return [guard for guard in guards if guard is not None]


def make_serving_guards(file: PartyFile, book: RecordBook) -> list[ServingGuard]:
    """Makes the guards of a program that serves, as ``GuardFactory.make_serving_guard``."""
    guards = [factory.make_serving_guard(file, book) for factory in load_factories(file)]
    return [guard for guard in guards if guard is not None]


def load_factories(file: PartyFile) -> list[GuardFactory]:
    """Returns the installed factories of guards, ordered by name.

    Raises InputError if the policy needs one that is not installed, or if one cannot be loaded.
    """
    entries = {entry.name: entry for entry in entry_points(group=_GROUP)}
    for name, key in _list_needed(file.policy):
        if name not in entries:
            raise InputError(
                Code.REFUSED,
                f"policy.{key} in the party file: needs the package vfl_governance, which is not "
                f"installed (entry point {name} of {_GROUP}). Install it, or remove the key.",
            )
    factories: list[GuardFactory] = []
    for _, entry in sorted(entries.items()):
        try:
            factories.append(entry.load())
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"the guard {entry.name!r} of {entry.value} cannot be loaded "
                f"({type(error).__name__}: {error}). Reinstall or remove it.",
            ) from error
    return factories


def _list_needed(policy: str | PolicySettings) -> Iterator[tuple[str, str]]:
    """Yields (name of an entry point, key) for each key of the policy that needs a guard."""
    if isinstance(policy, PolicySettings):
        if policy.approval != "none":
            yield "grants", "approval"
        if policy.account.amounts:
            yield "account", "account"


def list_leave_checks(guards: Iterable[InstalledGuard | ServingGuard]) -> list[LeaveCheck]:
    """Returns the checks of bundles that guards have."""
    return [check for guard in guards if (check := guard.leave_check) is not None]


def words_of(file: PartyFile, recipe: Recipe) -> WordsGuard:
    """Returns the guard that checks the party file's policy."""
    return WordsGuard(file.policy, file.name, recipe, file.pins)


def guards_of_trial(recipe: Recipe, name: str) -> Sequence[RunGuard]:
    """Returns the guards of a party in a trial on one machine, where parties have no keys."""
    return [WordsGuard(get_trial_policy_name(recipe, name), name, recipe, None)]


def trees_of_trial(recipe: Recipe, name: str) -> TreeLimits | None:
    """Returns the limits for trees that a party's policy sets in a trial, or None.

    A trial may use shorter keys.
    """
    policy = get_trial_policy_name(recipe, name)
    limits = policy.elsewhere.get("trees") if isinstance(policy, PolicySettings) else None
    return TreeLimits.model_validate({"least_key_bits": 1024, **limits}) if limits else None
