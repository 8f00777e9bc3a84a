"""Filter: one link of the chain through which everything passes that leaves a party."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vfl_common.bundle import BundleSpec

Tensors = Mapping[str, Tensor]


class Filter:
    """Changes tensors on their way out, and undoes at the receiver what can be undone.

    A transform (noise), a policy and a codec are filters. This base class changes nothing. ``text``: its name in
    `vfl forecast` and the summary.
    """

    text = "nothing"
    knows: frozenset[str] = frozenset()  # names of tensors that it must be told before each ``apply``

    def tell(self, beside: Tensors) -> None:
        """Takes what the sender knows of the rows that leave next, such as their labels; it is not sent."""
        _ = beside

    def apply(self, tensors: Tensors) -> Tensors:
        """Returns the tensors to send; called at the sender. Raises VflError if they may not leave."""
        return tensors

    def undo(self, tensors: Tensors) -> Tensors:
        """Returns the inverse of ``apply``, as far as there is one; called at the receiver."""
        return tensors

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec of tensors of ``spec`` after ``apply``."""
        return spec

    def state(self) -> dict[str, Any] | None:
        """Returns what later calls of ``apply`` depend on, for the party's own checkpoints; None if nothing."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        _ = state
