"""Filter: one step of the chain that all tensors pass before they leave a party."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor

from vfl_common.bundle import BundleSpec, StepKey
from vfl_party.base.mechanism import Mechanism

Tensors = Mapping[str, Tensor]


class Passage(NamedTuple):
    """The step, sender and receiver of one bundle."""

    step: StepKey
    sender: str
    receiver: str


# The passage of tensors that are not part of a bundle, such as tensors in a test.
NOWHERE = Passage(StepKey("", 0, 0), "", "")


class OutboundBundle(NamedTuple):
    """A bundle that is about to leave.

    ``kind``: the ledger's name of the kind. ``to``: the receivers, each of which gets the whole
    bundle. ``numbers``: the number of values before the codec. ``rows``: the numbers of the rows
    that the bundle describes, or the record's word for all or no rows; None: no individual rows.
    ``people``: the number of rows that the bundle describes individually.
    """

    step: StepKey
    kind: str
    to: Sequence[str]
    numbers: int
    payload_bytes: int
    rows: Sequence[int] | npt.NDArray[Any] | str | None
    people: int


class Filter:
    """Changes tensors before they leave, and undoes at the receiver what can be undone.

    A transform (noise), a policy and a codec are filters. This base class changes nothing. A filter
    that needs the step overrides ``apply_at`` instead of ``apply``. A filter whose receiver needs
    the original spec overrides ``undo_at`` instead of ``undo``.

    ``text``: the filter's name in `vfl forecast` and the summary. ``on_host``: whether arriving
    tensors pass ``undo_at`` before they are copied to a GPU, if no other filter is undone first.
    ``repeats``: whether the same tensors at the same step give the same result for every receiver.
    ``draws``: whether the filter adds noise. ``of_plugin``: whether the filter is a transform of a
    plug-in; set when the filter is made. ``costs``: the privacy cost for a row of each tensor that
    describes it, if the filter is differentially private regardless of the other filters; None: it
    is not.
    """

    text = "nothing"
    on_host = False
    repeats = False
    draws = False
    of_plugin = False
    costs: Mechanism | None = None
    # Names of tensors that ``tell`` must pass to the filter before each ``apply``.
    knows: frozenset[str] = frozenset()

    def tell(self, beside: Tensors) -> None:
        """Receives tensors about the next rows, such as their labels. The sender has them and does
        not send them.
        """
        _ = beside

    def apply(self, tensors: Tensors) -> Tensors:
        """Returns the tensors to send. The sender calls this. Raises VflError if the tensors may
        not leave.
        """
        return tensors

    def leaves(self, leaving: OutboundBundle) -> None:
        """Checks a bundle that has passed ``apply``. The sender calls this before the bundle is
        recorded and sent. Raises VflError if the bundle may not leave.
        """
        _ = leaving

    def renew(self) -> None:
        """Replaces the random generator, so that the next noise is new. Called if a receiver would
        get the same noise twice.
        """

    def undo(self, tensors: Tensors) -> Tensors:
        """Returns the inverse of ``apply``, as far as one exists. The receiver calls this."""
        return tensors

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        """Applies the filter to the bundle ``at``. The chain calls this method, which calls
        ``apply`` by default.
        """
        _ = at
        return self.apply(tensors)

    def undo_at(self, at: Passage, tensors: Tensors, spec: BundleSpec) -> Tensors:
        """Undoes the filter for the bundle ``at``; calls ``undo`` by default. ``spec``: the spec of
        the tensors before ``apply``.
        """
        _ = at, spec
        return self.undo(tensors)

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec, after ``apply``, of tensors that have ``spec`` before it."""
        return spec

    def state(self) -> dict[str, Any] | None:
        """Returns the state on which later calls of ``apply`` depend, for the party's checkpoints;
        None without a state.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        _ = state
