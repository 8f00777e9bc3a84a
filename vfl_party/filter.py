"""Filter: one link of the chain through which everything goes that leaves a party."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vfl_common.bundle import BundleSpec

Tensors = Mapping[str, Tensor]


class Filter:
    """Changes tensors on their way out, and undoes at the receiver what can be undone.

    A transform (noise), a policy and a codec are filters. This one changes nothing. ``text``: what `vfl forecast` and
    the summary call it.
    """

    text = "nothing"

    def apply(self, tensors: Tensors) -> Tensors:
        """At the sender: {name: tensor} as they go on. Raises VflError if they may not leave."""
        return tensors

    def undo(self, tensors: Tensors) -> Tensors:
        """At the receiver: the inverse of ``apply``, as far as there is one."""
        return tensors

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """The spec of what ``apply`` makes of tensors of ``spec``."""
        return spec

    def state(self) -> dict[str, Any] | None:
        """What later calls of ``apply`` depend on, for the party's own checkpoints; None if nothing."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Resumes with what ``state`` gave."""
        _ = state
