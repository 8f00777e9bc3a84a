"""An observer sees the messages of a party's exchanges in a rehearsal.

It is part of the chains of that party, which the leak meter replaces before the party runs. A real
party has no observer and no hook for one: its steps do nothing for the leak meter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from vfl_common.bundle import BundleSpec
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.filter import NOWHERE, Passage, Tensors


class Observer(Protocol):
    """Observes both directions of one exchange at one party. It must not change a tensor."""

    def leaves(self, at: Passage, meant: Tensors, sent: Tensors) -> None:
        """Observes a message that a party sends.

        Args:
            at: the step, the sender and the receiver; the receiver is empty for a message to all.
            meant: the tensors before the sender's chain.
            sent: the tensors after it.
        """
        ...

    def comes(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        """Observes a message that a party has received.

        Args:
            at: the step, the sender and the receiver.
            tensors: the tensors that the receiver uses.
            payload_bytes: the size of the payload on the wire.
        """
        ...


def observe(end: Asking | Answering, observer_of: Callable[[Chains], Observer]) -> None:
    """Adds an observer to one side of an exchange.

    Args:
        end: the asking or the answering side, before the first step.
        observer_of: makes the observer from the original chains of the party.
    """
    own = end.chains
    observer = observer_of(own)
    end.chains = Chains(
        ObservedChain(own.up, observer), ObservedChain(own.down, observer), own.party
    )


class ObservedChain(Chain):
    """A chain that behaves like the given one, and reports to an observer."""

    # Each receiver's tensors pass through the chain, so that the observer hears all of them. The
    # results are the same: that is what ``repeats`` promises of the filters.
    repeats = False

    def __init__(self, chain: Chain, observer: Observer) -> None:
        # Filters, noise and state are shared with the given chain.
        vars(self).update(vars(chain))
        self._observer = observer

    def apply(self, tensors: Tensors, at: Passage = NOWHERE) -> Tensors:
        sent = super().apply(tensors, at)
        self._observer.leaves(at, tensors, sent)
        return sent

    def undo(
        self, tensors: dict[str, Tensor], at: Passage = NOWHERE, spec: BundleSpec | None = None
    ) -> dict[str, Tensor]:
        received = super().undo(tensors, at, spec)
        return self._came(received, at, spec)

    def undo_rest(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        return self._came(super().undo_rest(tensors, at, spec), at, spec)

    def _came(
        self, received: dict[str, Tensor], at: Passage, spec: BundleSpec | None
    ) -> dict[str, Tensor]:
        payload_bytes = self.wire_spec(spec).payload_bytes if spec is not None else 0
        self._observer.comes(at, received, payload_bytes)
        return received
