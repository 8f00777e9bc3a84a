"""Creates the guards of a party, which may refuse a run before anything is sent.

``WordsGuard`` checks the table ``[policy]`` of the party file, which may list plug-ins by the
digests of their code. Other packages add guards as entry points of the group ``vfl.guards``: each
is a ``GuardFactory``.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vfl_common.config.party import PartyFile, TreeLimits
from vfl_common.config.policy import Pin, PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.run_folder import RunFolder
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.outbound.policies import format_value, get_trial_policy_name, policy_error
from vfl_party.policy.meeting import ProposedRun, RunGuard
from vfl_party.predict.prediction import exchanges_of
from vfl_party.record.book import RecordBook
from vfl_party.record.recorder import LeaveCheck

_GROUP = "vfl.guards"
# The digest of a plug-in without files.
_UNKNOWN = "sha256:unknown"


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


def describe_missing_policy(policy: str | PolicySettings) -> str:
    """Returns a note on a party file without a table [policy], or '' if it has the table."""
    if isinstance(policy, PolicySettings):
        return ""
    if policy == "allow_all":
        return (
            "this party file has no table [policy], so a recipe may send everything, without "
            'limits. Set level = "careful" in [policy].'
        )
    return (
        f"this party file has no table [policy], so only the plug-in {policy} decides what is "
        "sent, "
        f'without limits. Set plugin = "{policy}" in [policy].'
    )


class WordsGuard:
    """Checks a run against a party's policy.

    Args:
        policy: The policy of the party file.
        name: The name of the party.
        recipe: The recipe of the run.
        pins: {peer: pin of the only key that it may have}. None on one machine, without keys.
    """

    key = "policy"

    def __init__(
        self,
        policy: str | PolicySettings,
        name: str,
        recipe: Recipe,
        pins: Mapping[str, Pin] | None,
    ) -> None:
        self._policy, self._name, self._recipe, self._pins = policy, name, recipe, pins

    def before(self, asked: ProposedRun) -> None:
        """Raises InputError (REFUSED) with the key of the policy if the run violates it."""
        if not isinstance(self._policy, PolicySettings):
            return
        policy = self._policy
        self.serves()
        if policy.plugins is not None:
            self._check_plugins(policy.plugins, asked.plugins)
        self.check_epochs(asked.epochs)
        self._check_plan(policy, asked)
        if policy.demands and asked.opened.work.job == "train":
            # This also checks predictions. Otherwise they would be refused only after the training.
            exchanges_of(asked.party)

    def check_epochs(self, epochs: Mapping[str, int]) -> None:
        """Raises InputError (REFUSED) if a phase has more epochs than the policy allows.

        ``epochs``: {phase: number of epochs}.
        """
        if not isinstance(self._policy, PolicySettings) or self._policy.most_epochs is None:
            return
        limit = self._policy.most_epochs
        for name, count in epochs.items():
            if count > limit:
                raise policy_error("most_epochs", limit, f"phase {name} has {count:,} epochs")

    def serves(self) -> None:
        """Raises InputError (REFUSED) if the policy forbids the recipe, its phases or the peers."""
        if not isinstance(self._policy, PolicySettings):
            return
        policy = self._policy
        self._check_recipe(policy)
        self._check_peers(policy)
        for phase in self._recipe.phases:
            if policy.phases is not None and phase.kind not in policy.phases:
                kind = f"phase {phase.name} of the recipe is of kind {phase.kind}"
                raise policy_error("phases", policy.phases, kind)

    def _check_recipe(self, policy: PolicySettings) -> None:
        digest = self._recipe.digest()
        if policy.recipes is not None and digest not in policy.recipes:
            actual = f"the recipe {self._recipe.name} has the digest {digest}"
            raise policy_error(
                "recipes", policy.recipes, actual, "Read the recipe, and add its digest."
            )

    def _check_peers(self, policy: PolicySettings) -> None:
        if self._pins is None or not (policy.pinned or policy.peers is not None):
            return
        everybody = (self._recipe.server, *(party.name for party in self._recipe.parties))
        for peer in everybody:
            if peer == self._name:
                continue
            pin = self._pins.get(peer)
            key = "peers" if policy.peers is not None else "pinned"
            if pin is None:
                wanted = policy.peers if policy.peers is not None else True
                raise policy_error(
                    key,
                    wanted,
                    f"pins has no entry for {peer}",
                    "Add the pin of its certificate, as `vfl certs show` prints it.",
                )
            if policy.peers is not None and pin not in policy.peers:
                raise policy_error("peers", policy.peers, f"the key of {peer} is {pin}")

    @staticmethod
    def _check_plugins(allowed: tuple[str, ...], used: Iterable[str]) -> None:
        for name, digest in digests(used):
            if name not in allowed and f"{name} = {digest}" not in allowed:
                raise policy_error(
                    "plugins",
                    allowed,
                    f"the run uses the plug-in {name} = {digest}",
                    "Read that plug-in, and add it.",
                )

    def _check_plan(self, policy: PolicySettings, asked: ProposedRun) -> None:
        if not (policy.least_rows > 1 or policy.most_numbers or policy.most_bytes):
            return
        plan = asked.plan
        if plan is None:
            # The run has too many steps to count in advance. The bundles are counted when sent.
            return
        for (phase, exchange), rows in plan.batches.items():
            if rows < policy.least_rows:
                raise policy_error(
                    "least_rows",
                    policy.least_rows,
                    f"a batch of exchange {exchange} in phase {phase} has {rows:,} rows",
                    "Ask for another batch_size, or change the policy.",
                )
        for peer, numbers in plan.numbers.items():
            if policy.most_numbers is not None and numbers > policy.most_numbers:
                raise policy_error(
                    "most_numbers",
                    policy.most_numbers,
                    f"{peer} would get {numbers:,} numbers about one person",
                    "Ask for fewer epochs or a smaller embedding_size, or change the policy.",
                )
        if policy.most_bytes is not None and plan.payload_bytes > policy.most_bytes:
            planned = f"this party would send {plan.payload_bytes:,} bytes"
            raise policy_error("most_bytes", policy.most_bytes, planned)

    def shows(self) -> dict[str, Any]:
        """Returns the table ``[policy]`` with the defaults of its level, or a plug-in's name."""
        if isinstance(self._policy, str):
            return {"plugin": self._policy}
        return self._policy.model_dump(mode="json", exclude_none=True)

    def meet(self, run_id: str, tables: Mapping[str, Any]) -> None:
        """Raises PeerError if the server did not relay this party's policy unchanged."""
        _ = run_id
        if isinstance(self._policy, PolicySettings) and tables.get(self._name) != self.shows():
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                "the server did not relay this party's policy unchanged. Install this release at "
                "the server, too.",
                party=self._recipe.server,
            )


def describe_policy(policy: str | PolicySettings) -> Iterator[str]:
    """Yields a line for each key of a policy that sets a limit or a demand."""
    if isinstance(policy, str):
        yield describe_missing_policy(policy)
        return
    yield f"level = {policy.level}"
    fields = policy.model_dump(
        mode="json", exclude_none=True, exclude={"level", "account", "demands"}
    )
    for key, value in fields.items():
        if value not in (False, [], "none") and not (key == "least_rows" and value == 1):
            yield f"{key} = {format_value(value)}"
        elif value == [] and key in ("phases", "kinds", "peers", "recipes", "plugins"):
            yield f"{key}: none"
    for demand in policy.demands:
        bounds = [f"{name} at least {bound:g}" for name, bound in demand.at_least.items()]
        bounds += [f"{name} at most {bound:g}" for name, bound in demand.at_most.items()]
        yield f"demands: {', '.join([f'{demand.transform} on {demand.kind}', *bounds])}"
    for key, value in policy.account.model_dump(exclude_none=True).items():
        if (key != "delta" or policy.account.epsilon is not None) and value is not False:
            yield f"account.{key} = {format_value(value)}"


def digests(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (``group:name``, digest) for each installed plug-in in ``names``.

    ``names``: The plug-ins as ``group:name``.
    """
    for name in names:
        group, _, short = name.partition(":")
        for entry in entry_points(group=group, name=short):
            yield name, digest_of(entry.module)


def digest_of(module: str) -> str:
    """Returns the digest of a module's code, as ``sha256:`` and the hexadecimal digest.

    For a module in a package, the digest includes the names and contents of all files in the
    package, because the module may import or read them. In a namespace package, which several
    projects share, only the package inside it counts. The code is not run. Returns
    ``sha256:unknown`` if there are no files.
    """
    spec = _find_outermost_package(module)
    if spec is None:
        return _UNKNOWN
    if spec.submodule_search_locations is not None:
        roots = [Path(location) for location in spec.submodule_search_locations]
        files = sorted((root, path) for root in roots for path in _yield_files(root))
    elif spec.has_location and spec.origin is not None:
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    else:
        files = []
    digest = hashlib.sha256()
    for root, path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()!r} {content}\n".encode())
    return f"sha256:{digest.hexdigest()}" if files else _UNKNOWN


def _find_outermost_package(module: str) -> ModuleSpec | None:
    """Returns the spec of the outermost package or module that is not a namespace package.

    For ``a.b.c`` this is ``a``, or else ``a.b``, or else ``a.b.c``. Finding the spec of ``a.b``
    imports ``a``, which runs no code if ``a`` is a namespace package.
    """
    parts, spec = module.split("."), None
    for count in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:count]))
        if spec is None or spec.origin is not None:
            break
    return spec


def _yield_files(root: Path) -> Iterator[Path]:
    """Yields the files in a folder and its subfolders, without compiled Python files."""
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.relative_to(root).parts:
            yield path
