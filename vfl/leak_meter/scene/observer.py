"""An observer sees the messages of a party's exchanges in a rehearsal.

The leak meter inserts it into the chains of transforms of that party before the party runs. A real
party has no observer and no hook for an observer.
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

    def note_sent(self, at: Passage, meant: Tensors, sent: Tensors) -> None:
        """Observes a message that a party sends.

        Args:
            at: the step, the sender and the receiver; the receiver is empty for a message to all.
            meant: the tensors before the sender's chain.
            sent: the tensors after it.
        """
        ...

    def note_received(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        """Observes a message that a party has received.

        Args:
            at: the step, the sender and the receiver.
            tensors: the tensors that the receiver uses.
            payload_bytes: the size of the payload on the wire.
        """
        ...


def observe(end: Asking | Answering, make_observer: Callable[[Chains], Observer]) -> None:
    """Adds an observer to one side of an exchange.

    Args:
        end: the asking or the answering side, before the first step.
        make_observer: makes the observer from the original chains of the party.
    """
    chains = end.chains
    observer = make_observer(chains)
    end.chains = Chains(
        ObservedChain(chains.up, observer), ObservedChain(chains.down, observer), chains.party
    )


class ObservedChain(Chain):
    """A chain that behaves like the given one, and reports to an observer."""

    # With False, the tensors for each receiver pass through the chain separately, so that the
    # observer sees all of them. The results do not change.
    repeats = False

    def __init__(self, chain: Chain, observer: Observer) -> None:
        # This chain shares the filters, noise and state of the given chain.
        vars(self).update(vars(chain))
        self._observer = observer

    def apply(self, tensors: Tensors, at: Passage = NOWHERE) -> Tensors:
        sent = super().apply(tensors, at)
        self._observer.note_sent(at, tensors, sent)
        return sent

    def undo(
        self, tensors: dict[str, Tensor], at: Passage = NOWHERE, spec: BundleSpec | None = None
    ) -> dict[str, Tensor]:
        received = super().undo(tensors, at, spec)
        return self._observe_received(received, at, spec)

    def undo_rest(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        return self._observe_received(super().undo_rest(tensors, at, spec), at, spec)

    def _observe_received(
        self, received: dict[str, Tensor], at: Passage, spec: BundleSpec | None
    ) -> dict[str, Tensor]:
        payload_bytes = self.wire_spec(spec).payload_bytes if spec is not None else 0
        self._observer.note_received(at, received, payload_bytes)
        return received
