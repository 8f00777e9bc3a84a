"""Stores what parties receive in a rehearsal in files, so that a long run needs little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from torch import Tensor

from vfl_common.bundle import StepKey

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
