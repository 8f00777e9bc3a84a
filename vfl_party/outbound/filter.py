"""Filter: one link of the chain through which everything passes that leaves a party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor

from vfl_common.bundle import BundleSpec, StepKey
from vfl_party.base.mechanism import Mechanism

Tensors = Mapping[str, Tensor]


class Passage(NamedTuple):
    """One bundle on its way: the step, and between whom."""

    step: StepKey
    sender: str
    receiver: str


# For tensors that are not part of a bundle, such as those of a test.
NOWHERE = Passage(StepKey("", 0, 0), "", "")


class OutboundBundle(NamedTuple):
    """A bundle that is about to leave.

    ``kind``: the ledger's word; ``to``: the receivers, each of which gets the whole; ``numbers``:
    before the codec; ``rows``: the rows it tells of, by number, or as the record writes all or
    none; None: no single rows; ``people``: how many rows it tells of, one by one.
    """

    step: StepKey
    kind: str
    to: Sequence[str]
    numbers: int
    payload_bytes: int
    rows: Sequence[int] | npt.NDArray[Any] | str | None
    people: int


class Filter:
    """Changes tensors on their way out, and undoes at the receiver what can be undone.

    A transform (noise), a policy and a codec are filters. This base class changes nothing.
    ``text``: its name in `vfl forecast` and the summary. A filter that must know the step overrides
    ``apply_at`` instead of ``apply``; one whose receiver must know what was sent overrides
    ``undo_at`` instead of ``undo``. ``on_host``: what arrives passes ``undo_at`` before it is
    copied to a GPU, if no other filter comes first. ``repeats``: the same tensors at the same step
    become the same for every receiver. ``draws``: it adds noise. ``of_plugin``: it is a transform
    of a plug-in; set when it is made. ``costs``: what it costs a row each time that a tensor tells
    of it, if that is differentially private whatever comes before and after; None: it is not.
    """

    text = "nothing"
    on_host = False
    repeats = False
    draws = False
    of_plugin = False
    costs: Mechanism | None = None
    # Names of tensors that it must be told before each ``apply``.
    knows: frozenset[str] = frozenset()

    def tell(self, beside: Tensors) -> None:
        """Takes what the sender knows of the rows that leave next, such as their labels; it is not
        sent.
        """
        _ = beside

    def apply(self, tensors: Tensors) -> Tensors:
        """Returns the tensors to send; called at the sender. Raises VflError if they may not
        leave.
        """
        return tensors

    def leaves(self, leaving: OutboundBundle) -> None:
        """Called at the sender for each bundle that passed ``apply``, before it leaves, and before
        the record has it. Raises VflError if it may not leave.
        """
        _ = leaving

    def renew(self) -> None:
        """Forgets the noise that was to come, and draws other; called if a receiver would get the
        same noise twice.
        """

    def undo(self, tensors: Tensors) -> Tensors:
        """Returns the inverse of ``apply``, as far as there is one; called at the receiver."""
        return tensors

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        """Does what ``apply`` does, for the bundle ``at``; the chain calls this one."""
        _ = at
        return self.apply(tensors)

    def undo_at(self, at: Passage, tensors: Tensors, spec: BundleSpec) -> Tensors:
        """Does what ``undo`` does, for the bundle ``at``; ``spec``: of the tensors before
        ``apply``.
        """
        _ = at, spec
        return self.undo(tensors)

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec of tensors of ``spec`` after ``apply``."""
        return spec

    def state(self) -> dict[str, Any] | None:
        """Returns what later calls of ``apply`` depend on, for the party's own checkpoints; None if
        nothing.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        _ = state
