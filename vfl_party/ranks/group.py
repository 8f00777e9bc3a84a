"""Messages between the processes of one party: words from rank 0, tensors both ways."""

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
from vfl_common.process.signals import Stopped
from vfl_party.base.devices import launched

log = logging.getLogger(__name__)

# For the next word: torchrun ends all processes if one dies.
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
_FIELDS = 5
# For all processes to start.
_ALL_THERE_S = 120
# In its errors, plain RuntimeErrors: its file, or an earlier timeout.
_GLOO_SAYS = ("/gloo/", "pair closure")


class Word(IntEnum):
    """Commands of rank 0 to the others."""

    # A generation: make an encoder for these inputs.
    BEGIN = 1
    # Embed your share of a batch.
    FORWARD = 2
    # Take the gradient of these embeddings.
    BACKWARD = 3
    END = 4


class RankLost(Stopped):
    """Another process of this party has ended. The run has not failed: restart the party, and it
    resumes.
    """


@contextmanager
def together() -> Iterator[None]:
    """Turns torch's errors about broken connections into RankLost while the block lasts; leaves
    other errors alone.
    """
    try:
        yield
    except RuntimeError as error:
        if not (
            isinstance(error, dist.DistError) or any(mark in str(error) for mark in _GLOO_SAYS)
        ):
            raise
        why = str(error).strip().partition("\n")[0][:200]
        text = f"the processes of this party lost each other ({type(error).__name__}: {why})"
        log.exception(text, extra={"event": "failed"})
        raise RankLost(
            f"{text}; start them again with the same command, and the run resumes"
        ) from error


def shares(rows: int, ranks: int) -> list[int]:
    """Returns the number of rows for each rank: as equal as possible, with more for the first; some
    may get none.
    """
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


@dataclass(frozen=True)
class Ranks:
    """This process within its party.

    ``words`` (gloo) waits as long as it takes, ``tensors`` (NCCL between GPUs) as long as a step
    may take.
    """

    rank: int
    size: int
    device: torch.device
    words: dist.ProcessGroup
    tensors: dist.ProcessGroup

    def tell(self, word: Word, *fields: int) -> None:
        """Sends a word to all others, at rank 0."""
        message = torch.zeros(1 + _FIELDS, dtype=torch.int64)
        message[: 1 + len(fields)] = torch.tensor([word, *fields])
        dist.broadcast(message, src=0, group=self.words)

    def hear(self) -> tuple[Word, list[int]]:
        """Waits for the next word, at the other ranks; returns it with its fields."""
        message = torch.zeros(1 + _FIELDS, dtype=torch.int64)
        dist.broadcast(message, src=0, group=self.words)
        return Word(int(message[0])), message[1:].tolist()

    def numbers(self, values: Sequence[int], count: int) -> list[int]:
        """Broadcasts rank 0's ``values`` (``count`` integers) to all ranks."""
        message = (
            torch.tensor(values, dtype=torch.int64)
            if self.rank == 0
            else torch.zeros(count, dtype=torch.int64)
        )
        if count:
            dist.broadcast(message, src=0, group=self.words)
        return [int(value) for value in message]

    def send(self, parts: Sequence[Tensor], to: Sequence[int]) -> None:
        """Sends each of the ranks ``to`` one tensor; skips empty ones."""
        works = [
            dist.isend(part.detach().contiguous(), rank, group=self.tensors)
            for part, rank in zip(parts, to, strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    def receive(self, parts: Sequence[Tensor], of: Sequence[int]) -> None:
        """Fills ``parts``, one from each of the ranks ``of``; skips empty ones."""
        works = [
            dist.irecv(part, rank, group=self.tensors)
            for part, rank in zip(parts, of, strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    @torch.no_grad()
    def spread(self, module: nn.Module) -> None:
        """Broadcasts rank 0's weights and buffers to all, in one message for each dtype."""
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
            dist.broadcast(flat, src=0, group=self.tensors)
            if self.rank:
                for tensor, part in zip(
                    own, torch.split(flat, [tensor.numel() for tensor in own]), strict=True
                ):
                    tensor.copy_(part.view_as(tensor))


@contextmanager
def started_by_torchrun(device: torch.device, timeout_s: float) -> Iterator[Ranks | None]:
    """Yields the processes that torchrun has started for this party; None if it has started only
    one, or none.

    Waits for all of them. At the end, and when rank 0 fails with an error of ours, rank 0 ends the
    others with a word. If rank 0 ends otherwise, its connections close, and that ends them. Raises
    InputError if they are on several machines.
    """
    rank, size, _ = launched()
    if size == 1:
        yield None
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        text = (
            f"torchrun has started {size} processes on several machines; a party's are on one: "
            "--nnodes 1"
        )
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
    except VflError:
        # Raised between two words.
        _end(ranks)
        raise
    _end(ranks)


@contextmanager
def _endable() -> Iterator[None]:
    """Lets SIGTERM end the process at once while the block lasts: torch waits without calling
    Python's handlers.
    """
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
