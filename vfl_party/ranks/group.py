"""What the processes of one party say to each other: words from rank 0, tensors both ways."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vfl_common.errors import Code, InputError, VflError
from vfl_common.program import Stopped
from vfl_party.devices import launched

log = logging.getLogger(__name__)

_AS_LONG_AS_IT_TAKES = timedelta(days=365)  # for the next word: torchrun ends all processes when one has died
_FIELDS = 5
_ALL_THERE_S = 120  # for all processes to have started
_GLOO_SAYS = ("/gloo/", "pair closure")  # its errors are plain RuntimeErrors, with its file or of an earlier timeout


class Word(IntEnum):
    """What rank 0 wants of the others."""

    BEGIN = 1  # a generation: an encoder of inputs like this
    FORWARD = 2  # embeddings of your share of a batch
    BACKWARD = 3  # the gradient of the last one's
    END = 4


class RankLost(Stopped):
    """Another process of this party has ended. The run is not failed: the party, started again, goes on with it."""


@contextmanager
def together() -> Iterator[None]:
    """Inside, what torch says of a connection that has broken becomes RankLost; other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or any(mark in str(error) for mark in _GLOO_SAYS)):
            raise
        why = str(error).strip().partition("\n")[0][:200]
        text = f"the processes of this party cannot go on together ({type(error).__name__}: {why})"
        log.exception(text, extra={"event": "failed"})
        raise RankLost(f"{text}; start them again with the same command, and the run goes on") from error


def shares(rows: int, ranks: int) -> list[int]:
    """How many rows of a batch each rank gets: as equal as can be, the first ones more, some none."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


@dataclass(frozen=True)
class Ranks:
    """This process among those of its party.

    ``words`` (gloo) waits as long as it takes, ``tensors`` (NCCL between GPUs) as long as a step may.
    """

    rank: int
    size: int
    device: torch.device
    words: dist.ProcessGroup
    tensors: dist.ProcessGroup

    def tell(self, word: Word, *fields: int) -> None:
        """Rank 0: a word to all others."""
        message = torch.zeros(1 + _FIELDS, dtype=torch.int64)
        message[: 1 + len(fields)] = torch.tensor([word, *fields])
        dist.broadcast(message, src=0, group=self.words)

    def hear(self) -> tuple[Word, list[int]]:
        """The others: the next word, and its fields."""
        message = torch.zeros(1 + _FIELDS, dtype=torch.int64)
        dist.broadcast(message, src=0, group=self.words)
        return Word(int(message[0])), message[1:].tolist()

    def numbers(self, values: Sequence[int], count: int) -> list[int]:
        """Of rank 0's ``values``, so many, at all."""
        message = torch.tensor(values, dtype=torch.int64) if self.rank == 0 else torch.zeros(count, dtype=torch.int64)
        if count:
            dist.broadcast(message, src=0, group=self.words)
        return [int(value) for value in message]

    def send(self, parts: Sequence[Tensor], to: Sequence[int]) -> None:
        """A tensor to each of the ranks; empty ones are not sent."""
        works = [
            dist.isend(part.detach().contiguous(), rank, group=self.tensors)
            for part, rank in zip(parts, to, strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    def receive(self, parts: Sequence[Tensor], of: Sequence[int]) -> None:
        """Fills a tensor from each of the ranks."""
        works = [
            dist.irecv(part, rank, group=self.tensors) for part, rank in zip(parts, of, strict=True) if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    @torch.no_grad()
    def spread(self, module: nn.Module) -> None:
        """Rank 0's weights and buffers to all; one message for each dtype."""
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
            dist.broadcast(flat, src=0, group=self.tensors)
            if self.rank:
                for tensor, part in zip(own, torch.split(flat, [tensor.numel() for tensor in own]), strict=True):
                    tensor.copy_(part.view_as(tensor))


@contextmanager
def started_by_torchrun(device: torch.device, timeout_s: float) -> Iterator[Ranks | None]:
    """The processes that torchrun has started for this party; None where it has started one, or none.

    Waits for all of them. At the end, or where rank 0 fails with an error of ours, the others are told so; whatever
    else ends rank 0 closes its connections, and they end by that. Raises InputError where they are on several machines.
    """
    rank, size, _ = launched()
    if size == 1:
        yield None
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        text = f"torchrun has started {size} processes on several machines; a party's are on one: --nnodes 1"
        raise InputError(Code.CONFIG_INVALID, text)
    with _endable(), together():
        dist.init_process_group("gloo", timeout=timedelta(seconds=_ALL_THERE_S))
        words = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tensors = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    assert isinstance(words, dist.ProcessGroup)  # noqa: S101 - every rank is in it
    assert isinstance(tensors, dist.ProcessGroup)  # noqa: S101
    ranks = Ranks(rank, size, device, words, tensors)
    try:
        yield ranks
    except VflError:  # raised between two words
        _end(ranks)
        raise
    _end(ranks)


@contextmanager
def _endable() -> Iterator[None]:
    """Inside, SIGTERM ends the process at once: torch waits without looking at Python's handlers."""
    ours = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def _end(ranks: Ranks) -> None:
    with together():
        if ranks.rank == 0:
            ranks.tell(Word.END)
        dist.destroy_process_group()
