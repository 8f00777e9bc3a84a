"""Records what all parties of a rehearsal send and receive, for attacks and judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from vfl_common.bundle import BundleSpec, Kind, StepKey
from vfl_leaks.scene.readable import Readable, find_facts
from vfl_leaks.scene.record import Key, Passed, Record, Seen
from vfl_leaks.scene.scene import Heard, Intercepted
from vfl_party.assembly.party import Assembled
from vfl_party.base.seeds import Rows
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Exchange, Role
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.filter import NOWHERE, Passage, Tensors

# The name of the tensor with one row per sample, by the kind of the bundle.
ROW_TENSORS = {Kind.GRADIENT: "dz", Kind.EMBEDDING: "z"}


@dataclass
class Recording:
    """The messages of one run.

    Args:
        folder: the folder for the recorded tensors; it must exist and be empty.
        every: the tensors of rounds 0, every, 2 x every and so on of each phase are stored.
    """

    folder: Path
    every: int = 1
    parties: dict[str, Assembled] = field(default_factory=dict)
    # {party: {phase: facts about the phase}}
    phases: dict[str, dict[str, Readable]] = field(default_factory=dict)
    # The messages of all rounds, in order.
    passed: list[Passed] = field(default_factory=list)
    # (message size, number of rows in the message)
    seen: list[tuple[Seen, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The gradients and embeddings.
        self.rows = Record(self.folder, self.every)
        # The exchanges whose messages are stored whole.
        (self.folder / "overheard").mkdir()
        self.overheard = Record(self.folder / "overheard", self.every)

    def attach(self, name: str, assembled: Assembled) -> None:
        """Starts to record all exchanges of a party. The party must be assembled, and not yet
        running.
        """
        party = assembled.party
        self.parties[name] = assembled
        self.phases[name] = {phase.name: find_facts(party, phase) for phase in assembled.phases}
        for end in party.exchanges.values():
            observe(end, partial(_Listener, self, name, party.role, end.exchange))

    def messages_of(self, attacker: str) -> Iterator[Heard]:
        """Yields the overheard messages from and to the attacker, in order."""
        message: tuple[Key, Tensor] | None = None
        for key, tensor in self.overheard.messages():
            if attacker not in (key.sender, key.receiver):
                continue
            if message is not None:
                yield _make_heard(*message, tensor if key.meant else None)
            message = None if key.meant else (key, tensor)
        if message is not None:
            yield _make_heard(*message, None)

    def batches(self, sender: str, receiver: str, kind: str) -> Iterator[Intercepted]:
        """Yields the batches of ``kind`` that ``sender`` sent to ``receiver`` in exchanges whose
        rows are known.
        """
        unsent: dict[Key, Tensor] = {}
        party = self.parties[receiver]
        phases = self.phases[receiver]
        for key, tensor in self.rows.messages(sender=sender, receiver=receiver):
            exchange = party.party.exchanges[key.phase, key.exchange].exchange
            asks = exchange.asks == "active" and self.parties[sender].party.role == "passive"
            if (
                exchange.up if asks else exchange.down
            ).kind.label != kind or key.phase not in phases:
                continue
            rows = self.rows_of(key)
            if rows is None or len(rows) != len(tensor):
                continue
            if key.meant:
                unsent[key] = tensor
                continue
            before = Key(
                key.phase, key.exchange, key.round, key.batch, key.sender, key.receiver, meant=True
            )
            yield Intercepted(
                key.phase,
                key.round,
                key.batch,
                rows,
                tensor,
                unsent.pop(before, None),
                key.exchange,
            )

    def rows_of(self, message: Key) -> Rows | None:
        """Returns the rows of a message by the facts about the receiver's phase; None if
        unknown.
        """
        phase = self.phases[message.receiver][message.phase]
        step = StepKey(message.phase, message.round, message.batch)
        return phase.rows_at(message.exchange, step)


@dataclass(frozen=True)
class _Listener:
    """Records the messages of one exchange at the party ``party_name``; see ``Observer``."""

    recording: Recording
    party_name: str
    role: Role
    exchange: Exchange
    chains: Chains

    def note_sent(self, at: Passage, meant: Tensors, sent: Tensors) -> None:
        # A message for all receivers has no rows.
        if not at.receiver:
            return
        self._record_time(at)
        if self.exchange.asks == "server":
            self._store_shared(at, sent)
        elif self.role == "active":
            self._store_rows(at, meant, meant=True)

    def note_received(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        self._record_time(at)
        if self.exchange.asks == "server":
            self._store_whole(at, tensors)
            return
        self._store_rows(at, tensors, meant=False)
        self._store_size(at, tensors, payload_bytes)
        self._store_overheard(at, tensors)

    def _record_time(self, at: Passage) -> None:
        """Records the time of a message once, at the side that asks."""
        if self.exchange.asks == "server" or self.role == "passive":
            step = at.step
            self.recording.passed.append(
                Passed(
                    step.phase,
                    self.exchange.name,
                    at.sender,
                    at.receiver,
                    step.round,
                    time.monotonic(),
                )
            )

    def _store_rows(self, at: Passage, tensors: Tensors, *, meant: bool) -> None:
        for name in ROW_TENSORS.values():
            if name in tensors:
                self.recording.rows.note(
                    self.exchange.name,
                    at.step,
                    tensors[name],
                    at.sender,
                    at.receiver,
                    meant=meant,
                )

    def _store_size(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        rows = {
            len(tensors[name])
            for name in ROW_TENSORS.values()
            if name in tensors and tensors[name].dim() == 2
        }
        step = at.step
        if rows and step.round % self.recording.every == 0:
            message = Seen(
                step.phase,
                self.exchange.name,
                at.sender,
                at.receiver,
                step.round,
                payload_bytes,
            )
            self.recording.seen.append((message, max(rows)))

    def _store_overheard(self, at: Passage, tensors: Tensors) -> None:
        """Stores all tensors of a message between parties, and then the truth behind it."""
        phases, name, step = self.recording.phases, self.exchange.name, at.step
        if name not in phases[self.party_name][step.phase].overheard:
            return
        note = self.recording.overheard.note
        for tensor_name, tensor in tensors.items():
            key_name = tensor_name if len(tensors) > 1 else ""
            note(name, step, tensor, at.sender, self.party_name, name=key_name)
        behind = phases[at.sender][step.phase].behind(name)
        if behind is not None:
            note(name, step, behind, at.sender, self.party_name, meant=True)

    def _store_shared(self, at: Passage, sent: Tensors) -> None:
        """Stores a message to the server as the server receives it."""
        if self._is_overheard(at):
            up = self.exchange.up.spec()
            self._store_whole(at, self.chains.up.undo(dict(sent), at, up))

    def _store_whole(self, at: Passage, tensors: Tensors) -> None:
        if self._is_overheard(at):
            for name, tensor in tensors.items():
                self.recording.overheard.note(
                    self.exchange.name, at.step, tensor, at.sender, at.receiver, name=name
                )

    def _is_overheard(self, at: Passage) -> bool:
        return self.exchange.name in self.recording.phases[self.party_name][at.step.phase].overheard


def _make_heard(key: Key, tensor: Tensor, behind: Tensor | None) -> Heard:
    return Heard(
        key.phase, key.exchange, key.round, key.sender, key.receiver, tensor, behind, key.tensor
    )


# An observer sees the messages of a party's exchanges in a rehearsal.
#
# The leak meter inserts it into the chains of transforms of that party before the party runs. A
# real party has no observer and no hook for an observer.


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
