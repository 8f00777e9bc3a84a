"""Stores what parties receive in a rehearsal in files, so that a long run needs little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from torch import Tensor

from vfl_common.bundle import StepKey

# (phase, exchange, sender, receiver)
Way = tuple[str, str, str, str]
# Number of bytes that are buffered before they are written.
_AT_ONCE = 32 * 2**20


@dataclass(frozen=True)
class Key:
    """The key of a message of an exchange at a step between two parties.

    ``meant``: whether it is from before the sender's chain. ``tensor``: the name of the tensor if
    the message has several.
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
    """One message as seen on the network, with the phase and the exchange, which its position in
    the run reveals.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    round: int
    payload_bytes: int


@dataclass(frozen=True)
class Passed:
    """The time of one message on the network, with what its position in the run reveals.

    ``at_s``: seconds on a common clock.
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
    _held: dict[Key, Tensor] = field(default_factory=dict)
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
        named: str = "",
    ) -> None:
        """Stores a copy of a message's tensor, or of the tensor ``named`` of several."""
        if step.round % self.every:
            return
        key = Key(step.phase, exchange, step.round, step.batch, sender, receiver, meant, named)
        held = tensor.detach().cpu().clone()
        self._held[key] = held
        self._bytes += held.nbytes
        if self._bytes >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered tensors."""
        if self._held:
            keys = tuple(self._held)
            named = {str(number): self._held[key].contiguous() for number, key in enumerate(keys)}
            safetensors.torch.save_file(named, self._path(len(self._files)))
            self._files.append(keys)
            self._held, self._bytes = {}, 0

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
            wanted = [
                (place, key)
                for place, key in enumerate(keys)
                if sender in (None, key.sender) and receiver in (None, key.receiver)
            ]
            if wanted:
                with safetensors.safe_open(self._path(number), framework="pt") as file:
                    for place, key in wanted:
                        yield key, file.get_tensor(str(place))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"
