"""Records what all parties of a rehearsal send and receive, for attacks and judges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from vfl.leak_meter.scene.observer import observe
from vfl.leak_meter.scene.readable import Readable, readable
from vfl.leak_meter.scene.record import Key, Passed, Record, Seen
from vfl.leak_meter.scene.scene import Heard, Intercepted
from vfl_common.bundle import Kind, StepKey
from vfl_party.assembly.party import Assembled
from vfl_party.base.seeds import Rows
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.declared import Exchange, Role
from vfl_party.outbound.filter import Passage, Tensors

# Tensors of rows, by the kind of their bundle.
ROW_TENSORS = {Kind.GRADIENT: "dz", Kind.EMBEDDING: "z"}


@dataclass
class Recording:
    """The messages of one run.

    Args:
        folder: for files; it must exist and be empty.
        every: tensors of rounds 0, every, 2 x every and so on are kept, in each phase.
    """

    folder: Path
    every: int = 1
    parties: dict[str, Assembled] = field(default_factory=dict)
    # {party: {phase: what is known about it}}.
    phases: dict[str, dict[str, Readable]] = field(default_factory=dict)
    # The messages of all rounds, in order.
    passed: list[Passed] = field(default_factory=list)
    # Each with the rows of the message.
    seen: list[tuple[Seen, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Gradients and embeddings, then the exchanges that are kept whole.
        self.rows = Record(self.folder, self.every)
        (self.folder / "overheard").mkdir()
        self.overheard = Record(self.folder / "overheard", self.every)

    def attach(self, name: str, assembled: Assembled) -> None:
        """Records all exchanges of a party's phases. Call it after the party is assembled, and
        before it runs.
        """
        party = assembled.party
        self.parties[name] = assembled
        self.phases[name] = {phase.name: readable(party, phase) for phase in assembled.phases}
        for end in party.exchanges.values():
            observe(end, partial(_Listener, self, name, party.role, end.exchange))

    def messages_of(self, attacker: str) -> Iterator[Heard]:
        """Yields the overheard messages between the attacker and others, in order."""
        held: tuple[Key, Tensor] | None = None
        for key, tensor in self.overheard.messages():
            if attacker not in (key.sender, key.receiver):
                continue
            if held is not None:
                yield _as_heard(*held, tensor if key.meant else None)
            held = None if key.meant else (key, tensor)
        if held is not None:
            yield _as_heard(*held, None)

    def batches(self, sender: str, receiver: str, kind: str) -> Iterator[Intercepted]:
        """Yields the batches that one party sent another, of exchanges whose rows are known."""
        meant: dict[Key, Tensor] = {}
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
                meant[key] = tensor
                continue
            before = Key(
                key.phase, key.exchange, key.round, key.batch, key.sender, key.receiver, meant=True
            )
            yield Intercepted(
                key.phase, key.round, key.batch, rows, tensor, meant.pop(before, None), key.exchange
            )

    def rows_of(self, message: Key) -> Rows | None:
        """Returns the rows of a message, as the receiver's phase knows them."""
        phase = self.phases[message.receiver][message.phase]
        step = StepKey(message.phase, message.round, message.batch)
        return phase.rows_at(message.exchange, step)


@dataclass(frozen=True)
class _Listener:
    """Records the messages of one exchange at the party ``me``; see ``Observer``."""

    recording: Recording
    me: str
    role: Role
    exchange: Exchange
    chains: Chains

    def leaves(self, at: Passage, meant: Tensors, sent: Tensors) -> None:
        # A message for all receivers is not about rows.
        if not at.receiver:
            return
        self._passes(at)
        if self.exchange.asks == "server":
            self._keep_shared(at, sent)
        elif self.role == "active":
            self._keep_rows(at, meant, meant=True)

    def comes(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        self._passes(at)
        if self.exchange.asks == "server":
            self._keep_whole(at, tensors)
            return
        self._keep_rows(at, tensors, meant=False)
        self._keep_size(at, tensors, payload_bytes)
        self._keep_overheard(at, tensors)

    def _passes(self, at: Passage) -> None:
        """Records the time at the asking side, because one of the two ends is enough."""
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

    def _keep_rows(self, at: Passage, tensors: Tensors, *, meant: bool) -> None:
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

    def _keep_size(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
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

    def _keep_overheard(self, at: Passage, tensors: Tensors) -> None:
        """Stores a message between parties whole, and then the truth behind it."""
        phases, name, step = self.recording.phases, self.exchange.name, at.step
        if name not in phases[self.me][step.phase].overheard:
            return
        note = self.recording.overheard.note
        for named, tensor in tensors.items():
            several = named if len(tensors) > 1 else ""
            note(name, step, tensor, at.sender, self.me, named=several)
        behind = phases[at.sender][step.phase].behind(name)
        if behind is not None:
            note(name, step, behind, at.sender, self.me, meant=True)

    def _keep_shared(self, at: Passage, sent: Tensors) -> None:
        """Stores a message to the server as the server receives it."""
        if self._is_overheard(at):
            up = self.exchange.up.spec()
            self._keep_whole(at, self.chains.up.undo(dict(sent), at, up))

    def _keep_whole(self, at: Passage, tensors: Tensors) -> None:
        if self._is_overheard(at):
            for named, tensor in tensors.items():
                self.recording.overheard.note(
                    self.exchange.name, at.step, tensor, at.sender, at.receiver, named=named
                )

    def _is_overheard(self, at: Passage) -> bool:
        return self.exchange.name in self.recording.phases[self.me][at.step.phase].overheard


def _as_heard(key: Key, tensor: Tensor, behind: Tensor | None) -> Heard:
    return Heard(
        key.phase, key.exchange, key.round, key.sender, key.receiver, tensor, behind, key.tensor
    )
