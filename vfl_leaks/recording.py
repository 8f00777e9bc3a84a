"""Records what all parties of a rehearsal send and receive, for attacks and judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vfl_common.bundle import BundleSpec, Kind, StepKey
from vfl_leaks.scene import Heard, Intercepted
from vfl_party.assembly.party import Assembled
from vfl_party.base.phase import Phase
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.base.seeds import Rows
from vfl_party.methods.head.settings import UPLOAD
from vfl_party.methods.head.upload import get_upload_splits
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Exchange, Role
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.filter import NOWHERE, Passage, Tensors
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import split_into_chunks

# A direction of an exchange: (phase, exchange, sender, receiver).
Way = tuple[str, str, str, str]


# Number of bytes to buffer before they are written to a file.
_AT_ONCE = 32 * 2**20


@dataclass(frozen=True)
class Key:
    """Identifies one recorded tensor: the exchange, the step and the two parties.

    ``meant``: whether the tensor was recorded before the sender's chain of transforms.
    ``tensor``: the name of the tensor if the message has several.
    """

    phase: str
    exchange: str
    round: int
    batch: int
    sender: str
    receiver: str
    meant: bool = False
    tensor: str = ""


@dataclass(frozen=True)
class Seen:
    """The size of one message on the network. Its position in the run reveals the phase and the
    exchange.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    round: int
    payload_bytes: int


@dataclass(frozen=True)
class Passed:
    """The time of one message on the network. Its position in the run reveals the phase and the
    exchange.

    ``at_s``: the time in seconds on the clock of the rehearsal.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    round: int
    at_s: float

    @property
    def way(self) -> Way:
        """The exchange and the direction."""
        return self.phase, self.exchange, self.sender, self.receiver


@dataclass
class Record:
    """The messages of one run.

    ``folder``: an existing, empty folder; ``every``: rounds 0, every, 2 x every, … are stored.
    """

    folder: Path
    every: int = 1
    _buffer: dict[Key, Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _files: list[tuple[Key, ...]] = field(default_factory=list)

    def note(
        self,
        exchange: str,
        step: StepKey,
        tensor: Tensor,
        sender: str,
        receiver: str,
        *,
        meant: bool = False,
        name: str = "",
    ) -> None:
        """Stores a copy of a message's tensor. ``name``: its name if the message has several."""
        if step.round % self.every:
            return
        key = Key(step.phase, exchange, step.round, step.batch, sender, receiver, meant, name)
        copied = tensor.detach().cpu().clone()
        self._buffer[key] = copied
        self._bytes += copied.nbytes
        if self._bytes >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered tensors."""
        if self._buffer:
            keys = tuple(self._buffer)
            tensors = {
                str(number): self._buffer[key].contiguous() for number, key in enumerate(keys)
            }
            safetensors.torch.save_file(tensors, self._path(len(self._files)))
            self._files.append(keys)
            self._buffer, self._bytes = {}, 0

    def keys(self) -> Iterator[Key]:
        """Yields the keys of all messages in the order in which they came."""
        self.flush()
        for keys in self._files:
            yield from keys

    def messages(
        self, *, sender: str | None = None, receiver: str | None = None
    ) -> Iterator[tuple[Key, Tensor]]:
        """Yields the messages between two parties (None: any), in the order in which they came."""
        self.flush()
        for number, keys in enumerate(self._files):
            matches = [
                (place, key)
                for place, key in enumerate(keys)
                if sender in (None, key.sender) and receiver in (None, key.receiver)
            ]
            if matches:
                with safetensors.safe_open(self._path(number), framework="pt") as file:
                    for place, key in matches:
                        yield key, file.get_tensor(str(place))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"


# A plug-in's phase may provide these facts itself. The facts about the built-in methods are defined
# here, so that the methods need no knowledge of attacks.
class Readable(Protocol):
    """The facts about a phase by which a rehearsal judges attacks.

    A plug-in's phase may have any of these members.
    """

    @property
    def overheard(self) -> frozenset[str]:
        """The names of exchanges whose messages are kept whole, for ``Scene.heard``."""
        ...

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        """Returns the rows of an exchange's tensors at a step, in order, int64 [B]; None if its
        tensors have no rows, or unknown rows.
        """
        ...

    def behind(self, exchange: str) -> Tensor | None:
        """Returns the secret that the newest message of an overheard exchange hides, by which
        attacks are judged; None if the phase does not know it.
        """
        ...


def find_facts(party: Party, phase: Phase) -> Readable:
    """Returns the facts about a phase of ``party``: from this module for a built-in method, and
    from the phase itself for a plug-in.
    """
    kind = next(
        (settings.kind for settings in party.recipe.phases if settings.name == phase.name), ""
    )
    return _FACTS_BY_KIND.get(kind, _PluginFacts)(party, phase)


class _PhaseFacts:
    """The facts about a phase whose exchanges have no known rows, as most phases do."""

    overheard: frozenset[str] = frozenset()

    def __init__(self, party: Party, phase: Phase) -> None:
        self._party, self._phase = party, phase

    @cached_property
    def _settings(self) -> Any:
        name = self._phase.name
        return next(phase.settings for phase in self._party.course.phases if phase.name == name)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange, step
        return None

    def behind(self, exchange: str) -> Tensor | None:
        _ = exchange
        return None


class _PluginFacts(_PhaseFacts):
    """Passes on the facts that a plug-in's phase provides about itself."""

    def __init__(self, party: Party, phase: Phase) -> None:
        super().__init__(party, phase)
        self.overheard = frozenset(getattr(phase, "overheard", ()))

    @name_plugin_errors()
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        plugin_rows_at = getattr(self._phase, "rows_at", None)
        return plugin_rows_at(exchange, step) if plugin_rows_at is not None else None

    @name_plugin_errors()
    def behind(self, exchange: str) -> Tensor | None:
        plugin_behind = getattr(self._phase, "behind", None)
        return plugin_behind(exchange) if plugin_behind is not None else None


class _EvaluateFacts(_PhaseFacts):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange
        splits = self._settings.splits
        chunks_ = [
            chunk for split in splits for chunk in split_into_chunks(self._party.rows.get(split))
        ]
        # Later messages, such as means, have no rows.
        return chunks_[step.batch] if step.batch < len(chunks_) else None


class _HeadFacts(_PhaseFacts):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        if exchange != "upload" or step.round != UPLOAD:
            return None
        splits = get_upload_splits(self._party.recipe)
        return np.concatenate([self._party.rows.get(split) for split in splits])


class _SplitNNFacts(_PhaseFacts):
    @cached_property
    def _batches(self) -> Batches:
        return Batches(self._party, self._phase.name, self._settings)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        batches = [part for batch in self._batches.plan(step.round) for part in batch.parts]
        if exchange == "embedding":
            return batches[step.batch]
        if exchange == "validation":
            return split_into_chunks(self._party.rows.get("validation"))[step.batch - len(batches)]
        return None


class _FedHSSLFacts(_PhaseFacts):
    overheard = frozenset({"weights"})


class _SecureBoostFacts(_PhaseFacts):
    overheard = frozenset({"sums", "partition"})

    def behind(self, exchange: str) -> Tensor | None:
        """Returns the column of each sum of a tree, int64 [E]. Only the sender knows the order of
        the sums.
        """
        # Imported here, because trees have additional dependencies.
        from vfl_party.methods.secureboost.passive import PassiveSecureBoost

        phase = self._phase
        if exchange != "sums" or not isinstance(phase, PassiveSecureBoost) or not phase.offered:
            return None
        offer = phase.offered
        columns = [offer.layout.numbers[place].column for place in offer.order[: offer.sizes[0]]]
        return torch.tensor(columns, dtype=torch.int64)


_FACTS_BY_KIND: dict[str, type[_PhaseFacts]] = {
    "evaluate": _EvaluateFacts,
    "fedhssl": _FedHSSLFacts,
    "head": _HeadFacts,
    "secureboost": _SecureBoostFacts,
    "splitnn": _SplitNNFacts,
}


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
        for end in party.exchanges.opened.values():
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
            exchange = party.party.exchanges.opened[key.phase, key.exchange].exchange
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
