"""Policies, which decide what may leave a party. The party file chooses one: a name in
``POLICIES``, a plug-in, or the table ``[policy]``, which is applied to an exchange when its chain
is made, and to every bundle before it leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.bundle import Kind
from vfl_common.config.base import parse
from vfl_common.config.policy import Demand, PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names
from vfl_party.outbound import transforms
from vfl_party.outbound.declared import PREDICTION, PREDICTS, Exchange, Sent, Use
from vfl_party.outbound.filter import BuiltIns, Filter, OutboundBundle, Passage, Tensors
from vfl_party.record.lines import ALL

# Kinds of bundle whose numbers a codec may encode with fewer bits.
_CODED = ("embedding", "gradient")


class Policy(Protocol):
    """Makes the filter that decides what may leave this party in one exchange. It is called when a
    phase is made.
    """

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        """Returns the filter for the tensors that this party sends in ``exchange``. ``sent``: the
        direction of the exchange in which it sends, with all transforms.

        Raises InputError (REFUSED) if these tensors may never leave. The filter's ``apply`` may
        raise it later.
        """
        ...


def load(policy: str | PolicySettings, where: str, after: Policy | None = None) -> Policy:
    """Makes a policy from its settings or by its name. Raises InputError that names ``where`` if
    the name is unknown.

    ``after``: the policy that this party has used before the first phase.
    """
    if isinstance(policy, PolicySettings):
        plugin_policy = (
            load(policy.plugin, f"{where}.plugin") if policy.plugin is not None else None
        )
        return TablePolicy(policy, plugin_policy, after if isinstance(after, TablePolicy) else None)
    loaded: Policy = REGISTRY.make(policy, where, Callable)  # type: ignore[arg-type]
    return loaded


def get_trial_policy_name(recipe: Recipe, name: str) -> str | PolicySettings:
    """Returns the policy of a party in a trial on one machine, from ``simulate.policies``."""
    policies = recipe.simulate.policies if recipe.simulate is not None else {}
    return policies.get(name, "allow_all")


def load_trial_policy(recipe: Recipe, name: str, after: Policy | None = None) -> Policy:
    """Makes the policy of a party in a trial on one machine, from ``simulate.policies``; see
    ``load``. Raises InputError if the name is unknown.
    """
    return load(get_trial_policy_name(recipe, name), f"recipe: simulate.policies: {name}", after)


class AllowAll(Filter):
    """Allows every exchange that the phases declare; see ``Policy``."""

    text = "allow all"

    def __call__(self, _phase: str, _exchange: Exchange, _sent: Sent, /) -> Filter:
        return self


class Encrypted(Filter):
    """Refuses an exchange whose gradients are not encrypted; see ``Policy``."""

    text = "encrypted gradients only"

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        if sent.kind is Kind.GRADIENT and set(sent.tensors) != {"ciphertexts"}:
            raise InputError(
                Code.REFUSED,
                f"policy: gradients of phase {phase} (exchange {exchange.name}) may leave only "
                'encrypted. Use secureboost with encryption = "paillier" or "ou", or choose '
                "another policy.",
            )
        return self


def policy_error(key: str, wanted: Any, violation: str, remedy: str = "") -> InputError:
    """Returns the error for a violated policy key, with the key, its value and the violation. Only
    the party itself reads it.
    """
    sign = ": " if isinstance(wanted, str) or wanted == () else " = "
    fix = remedy or "Ask for less, or change the policy."
    return InputError(
        Code.REFUSED,
        f"policy.{key}{sign}{format_value(wanted)} in the party file: {violation}. {fix}",
    )


def format_value(value: Any) -> str:
    """Formats the value of a ``[policy]`` key for a message."""
    if isinstance(value, list | tuple):
        return list_names([str(item) for item in value]) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


class TablePolicy:
    """A policy written as settings; see ``Policy``.

    ``beside``: another policy, which must also allow the exchange. ``after``: the policy that
    counted what left while the parties compared their ids. Raises InputError if a demand names an
    unknown transform or setting.
    """

    def __init__(
        self,
        settings: PolicySettings,
        beside: Callable[[str, Exchange, Sent], Filter] | None = None,
        after: TablePolicy | None = None,
    ) -> None:
        for demand in settings.demands:
            _check_known(demand)
        self._settings, self._beside = settings, beside
        self._counts: SentCounts = SentCounts(after._counts if after is not None else None)

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        where = f"exchange {exchange.name} of phase {phase}"
        settings, kind = self._settings, sent.kind.label
        if settings.kinds is not None and kind not in settings.kinds:
            raise policy_error("kinds", settings.kinds, f"{where} sends {kind}")
        if kind in settings.encrypted and set(sent.tensors) != {"ciphertexts"}:
            raise policy_error(
                "encrypted",
                settings.encrypted,
                f"{where} sends {kind} that is not encrypted",
                'Use secureboost with encryption = "paillier" or "ou", or change the policy.',
            )
        for demand in settings.demands:
            if demand.kind == kind:
                transforms_text = (
                    f'with exchange = "{PREDICTION}"' if phase in PREDICTS else "of the phase"
                )
                _check_demand(demand, sent, where, transforms_text)
        counts, batches = self._counts, sent.about_rows
        if self._beside is None:
            return LimitFilter(settings, where, counts, batches)
        plugin_filter = self._beside(phase, exchange, sent)
        return CombinedLimitFilter(settings, where, counts, batches, plugin_filter)


def _check_known(demand: Demand) -> None:
    """Raises InputError if a demand names an unknown transform or setting."""
    where = "policy.demands in the party file"
    known = sorted(transforms.load(demand.transform, where).settings.model_fields)
    for name in (*demand.at_least, *demand.at_most):
        if name not in known:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the transform {demand.transform} has no setting {name}. Choose one of "
                f"{list_names(known)}."
                if known
                else f"{where}: the transform {demand.transform} has no settings (got {name}). "
                "Remove the bound.",
            )


def _check_demand(demand: Demand, sent: Sent, where: str, transforms_text: str) -> None:
    """Raises InputError (REFUSED) if the sent tensors do not pass the transform that the policy
    demands. ``transforms_text``: where to list the transform in the recipe, for the message.
    """
    uses = [use for use in sent.through if use.kind == demand.transform]
    if not uses:
        raise policy_error(
            "demands",
            demand.transform,
            f"{where} sends {demand.kind} without this transform",
            f"Add it to the transforms {transforms_text}.",
        )
    if all(uncovered := [sorted(use.leave & sent.tensors.keys()) for use in uses]):
        raise policy_error(
            "demands",
            demand.transform,
            f"{where} sends some tensors of {demand.kind} without this transform: "
            f"{list_names(uncovered[0])}",
        )
    # One sufficiently strong use of the transform satisfies the demand.
    violations = [_find_weakness(demand, use, where) for use in uses]
    if all(violations):
        bound, violation = violations[0] or ("", "")
        raise policy_error(
            f"demands: {demand.transform}", bound, violation, "Ask for a stronger one."
        )


def _find_weakness(demand: Demand, use: Use, where: str) -> tuple[str, str] | None:
    """Returns the violated bound and the violation if a transform is too weak; None if it is strong
    enough.
    """
    values = parse(
        transforms.load(use.kind, where).settings, dict(use.settings), where
    ).model_dump()
    for bounds, word, fits in (
        (demand.at_least, "at least", operator.ge),
        (demand.at_most, "at most", operator.le),
    ):
        for name, bound in bounds.items():
            value = values.get(name)
            number = isinstance(value, int | float)
            if not number or not fits(value, bound):
                return (
                    f"{name} {word} {bound:g}",
                    f"at {where}, {name} is {value:g}"
                    if number
                    else f"at {where}, {name} is not a number",
                )
    return None


class SentCounts:
    """Counts what a run has sent: numbers about each row, by receiver, and bytes.

    ``before``: the counts of what was sent before the first phase, whose bytes are included.
    """

    def __init__(self, before: SentCounts | None = None) -> None:
        self.bytes, self._before = 0, before
        # {receiver: the count of numbers about each row}, indexed by row number.
        self._numbers: dict[str, npt.NDArray[np.int64]] = {}
        # {receiver: the count of numbers in bundles about all rows}.
        self._all: dict[str, int] = {}
        # The filter of the first bundle, which saves this shared state in a checkpoint for all
        # filters.
        self._keeper: Filter | None = None

    def is_kept_by(self, filter_: Filter) -> bool:
        """Whether ``filter_`` saves this shared state in a checkpoint."""
        return self._keeper is filter_

    def add_bytes(self, filter_: Filter, sent_bytes: int) -> None:
        """Adds bytes that are about to leave through a filter."""
        if self._keeper is None:
            self._keeper = filter_
            self.bytes += self._before.bytes if self._before is not None else 0
        self.bytes += sent_bytes

    def add_numbers(self, receiver: str, rows: Any, width: int) -> int:
        """Adds ``width`` numbers about each of ``rows`` and returns the maximum count of a row."""
        all_rows = self._all.get(receiver, 0)
        counts = self._numbers.get(receiver, np.zeros(0, np.int64))
        if isinstance(rows, str):
            self._all[receiver] = all_rows + width
            return int(counts.max(initial=0)) + all_rows + width
        places = np.asarray(rows, np.int64)
        if len(places) and places.max() >= len(counts):
            counts = np.pad(counts, (0, int(places.max()) + 1 - len(counts)))
        # ``np.add.at`` also counts a row that is listed twice.
        np.add.at(counts, places, width)
        self._numbers[receiver] = counts
        return int(counts[places].max(initial=0)) + all_rows

    def state(self) -> dict[str, Any]:
        """Returns all counts, for a checkpoint."""
        numbers = {name: torch.from_numpy(counts.copy()) for name, counts in self._numbers.items()}
        return {"bytes": self.bytes, "numbers": numbers, "all": dict(self._all)}

    def load_state(self, state: dict[str, Any], keeper: Filter) -> None:
        """Restores the counts that ``state`` returned. From then on ``keeper`` saves them."""
        self._keeper = keeper
        self.bytes, self._all = state["bytes"], dict(state["all"])
        self._numbers = {name: counts.numpy().copy() for name, counts in state["numbers"].items()}


class LimitFilter(Filter):
    """Refuses a bundle that exceeds a limit of the policy. It changes no tensors.

    ``batches``: whether bundles have numbers for each row of a batch. For bits of trees,
    ``trees.least_rows`` counts the rows instead.
    """

    def __init__(
        self, settings: PolicySettings, where: str, counts: SentCounts, batches: bool
    ) -> None:
        self._settings, self._where, self._counts = settings, where, counts
        self._batches = batches
        self.text = f"policy: {settings.level}"

    def leaves(self, leaving: OutboundBundle) -> None:
        settings, counts = self._settings, self._counts
        counts.add_bytes(self, leaving.payload_bytes * len(leaving.to))
        if settings.most_bytes is not None and counts.bytes > settings.most_bytes:
            raise self._refusal("most_bytes", f"a total of {counts.bytes:,} bytes")
        bits = 8 * leaving.payload_bytes / max(1, leaving.numbers)
        if (
            settings.most_bits is not None
            and leaving.kind in _CODED
            and leaving.numbers
            and bits > settings.most_bits
        ):
            raise self._refusal("most_bits", f"a number takes {bits:.3g} bits")
        listed = leaving.rows is not None and not isinstance(leaving.rows, str)
        # Ids that are compared before the first phase do not count as numbers about a person.
        if not listed and (leaving.rows != ALL or leaving.kind == "rows"):
            return
        rows = leaving.people
        if self._batches and 0 < rows < settings.least_rows:
            raise self._refusal("least_rows", f"a batch has {rows:,} rows")
        width = -(-leaving.numbers // max(1, rows))
        for receiver in leaving.to:
            total = counts.add_numbers(receiver, leaving.rows, width)
            if settings.most_numbers is not None and total > settings.most_numbers:
                raise self._refusal(
                    "most_numbers", f"{receiver} would get {total:,} numbers about one person"
                )

    def _refusal(self, key: str, violation: str) -> InputError:
        bound = getattr(self._settings, key)
        return policy_error(key, bound, f"{violation} with {self._where}, which was not sent")

    def state(self) -> dict[str, Any] | None:
        return {"policy": self._counts.state()} if self._counts.is_kept_by(self) else None

    def load_state(self, state: dict[str, Any]) -> None:
        if state.get("policy") is not None:
            self._counts.load_state(state["policy"], self)


class CombinedLimitFilter(LimitFilter):
    """Applies the limits and then another policy's filter."""

    def __init__(
        self,
        settings: PolicySettings,
        where: str,
        counts: SentCounts,
        batches: bool,
        beside: Filter,
    ) -> None:
        super().__init__(settings, where, counts, batches)
        self._beside, self.text = beside, f"{self.text}, {beside.text}"
        self.on_host, self.repeats, self.draws = beside.on_host, beside.repeats, beside.draws
        self.of_plugin, self.knows = beside.of_plugin, beside.knows

    def leaves(self, leaving: OutboundBundle) -> None:
        super().leaves(leaving)
        self._beside.leaves(leaving)

    def tell(self, beside: Tensors) -> None:
        self._beside.tell(beside)

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        return self._beside.apply_at(at, tensors)

    def renew(self) -> None:
        self._beside.renew()

    def wire_spec(self, spec: Any) -> Any:
        return self._beside.wire_spec(spec)

    def state(self) -> dict[str, Any] | None:
        own_state, plugin_state = super().state(), self._beside.state()
        return (
            None
            if own_state is None and plugin_state is None
            else {**(own_state or {}), "beside": plugin_state}
        )

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if state.get("beside") is not None:
            self._beside.load_state(state["beside"])


# The policies by name, apart from the table ``[policy]``.
POLICIES: dict[str, Callable[[], Policy]] = {"allow_all": AllowAll, "encrypted": Encrypted}
REGISTRY = BuiltIns("vfl.policies", "policy", POLICIES, ours=tuple(POLICIES))
