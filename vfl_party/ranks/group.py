"""Messages between the processes of one party: words from rank 0, answers to it, tensors both
ways.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vfl_common.errors import VflError
from vfl_common.process.signals import Stopped
from vfl_party.base.devices import read_launch
from vfl_party.ranks.rendezvous import require_static

log = logging.getLogger(__name__)

# The timeout for the next word: torchrun ends all processes if one dies.
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
# The time for all processes to start.
_ALL_THERE_S = 120
# The time between two words of a rank at work.
_BEAT_S = 5.0
# Marks of gloo's errors, which are plain RuntimeErrors: its file, or an earlier timeout.
_GLOO_SAYS = ("/gloo/", "pair closure")


class Word(IntEnum):
    """Commands of rank 0 to the others."""

    # A generation: make these rows ready, and say whether they are rank 0's.
    BEGIN = 1
    # Make another encoder.
    ENCODER = 2
    # Make what draws random views.
    VIEWS = 3
    # Embed your share of a batch.
    FORWARD = 4
    # Take the gradient of these embeddings.
    BACKWARD = 5
    END = 6


# Positions of rows, and bytes: never a number of a row.
Whole = npt.NDArray[np.int64] | npt.NDArray[np.uint8]


class RankLost(Stopped):
    """Another process of this party has ended. The run has not failed: restart the party, and it
    resumes.
    """


@contextmanager
def convert_rank_errors() -> Iterator[None]:
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
        log.exception(
            "the processes of this party lost each other (%s: %s)",
            type(error).__name__,
            why,
            extra={"event": "failed"},
        )
        raise RankLost(
            f"the processes of this party lost each other ({type(error).__name__}: {why}). Start "
            "them again with the same command to resume the run."
        ) from error


def shares(rows: int, ranks: int) -> list[int]:
    """Returns the number of rows for each rank: as equal as possible, with more for the first; some
    may get none.
    """
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def pack(facts: dict[str, Any], arrays: Sequence[Whole]) -> Tensor:
    """Returns facts and arrays of whole numbers as bytes, uint8 [S]. Raises TypeError if an array
    holds other numbers, as rows do.
    """
    for array in arrays:
        if array.dtype not in (np.int64, np.uint8):
            raise TypeError(f"an array of {array.dtype} cannot be sent to other ranks")
    head = json.dumps([facts, [[array.dtype.str, len(array)] for array in arrays]]).encode()
    parts = [len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def unpack(body: Tensor) -> tuple[dict[str, Any], list[Whole]]:
    """Returns what ``packed`` was given."""
    data = body.numpy()
    # The arrays are of their own, and may be written to: torch warns of others.
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    facts, kinds = json.loads(data[8:at].tobytes())
    arrays: list[Whole] = []
    for kind, count in kinds:
        end = at + count * np.dtype(kind).itemsize
        arrays.append(np.frombuffer(bytearray(data[at:end]), kind))
        at = end
    return facts, arrays


@dataclass(frozen=True)
class Ranks:
    """This process within its party.

    ``words`` (gloo) and ``tensors`` (NCCL between GPUs) wait half as long as a step may take, and
    for the next word as long as it takes. ``beat_s``: how often a rank says that it is at work.
    """

    rank: int
    size: int
    device: torch.device
    words: dist.ProcessGroup
    tensors: dist.ProcessGroup
    beat_s: float

    def tell(
        self, word: Word, facts: dict[str, Any] | None = None, arrays: Sequence[Whole] = ()
    ) -> None:
        """Sends a word to all others, at rank 0, with facts as JSON and arrays of whole numbers."""
        body = pack(facts or {}, arrays)
        self._broadcast(torch.tensor([word, len(body)]))
        self._broadcast(body)

    def hear(self) -> tuple[Word, dict[str, Any], list[Whole]]:
        """Waits for the next word, at the other ranks; returns it with its facts and arrays."""
        word, size = self._broadcast(torch.zeros(2, dtype=torch.int64), _AS_LONG_AS_IT_TAKES)
        return Word(int(word)), *unpack(self._broadcast(torch.empty(int(size), dtype=torch.uint8)))

    def _broadcast(self, message: Tensor, timeout: timedelta | None = None) -> Tensor:
        how = dist.BroadcastOptions()
        if timeout is not None:
            how.timeout = timeout
        self.words.broadcast([message], how).wait()
        return message

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Waits at its end until the blocks of all ranks have ended; all enter it together.

        A block may take as long as it wants, since a thread says meanwhile that the rank lives.
        Raises an error of torch if a rank is silent for half as long as a step may take.
        """
        ended, failed = threading.Event(), list[RuntimeError]()

        def say() -> None:
            at_work = torch.ones(1)
            try:
                while at_work.item():
                    at_work.fill_(not ended.wait(self.beat_s))
                    dist.all_reduce(at_work, group=self.words)
            except RuntimeError as error:
                failed.append(error)

        # Not waited for if the block fails: the process then ends.
        thread = threading.Thread(target=say, name="at work", daemon=True)
        thread.start()
        yield
        ended.set()
        thread.join()
        if failed:
            raise failed[0]

    def answers(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Shows all ranks the facts of each; all call it together. Returns them by rank."""
        body = pack(facts, ())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(body)]), group=self.words)
        longest = int(max(sizes))
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        own = torch.cat([body, torch.zeros(longest - len(body), dtype=torch.uint8)])
        dist.all_gather(bodies, own, group=self.words)
        return [unpack(part[: int(size)])[0] for part, size in zip(bodies, sizes, strict=True)]

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
def join_ranks(device: torch.device, timeout_s: float) -> Iterator[Ranks | None]:
    """Yields the processes that torchrun has started for this party; None if it has started only
    one, or none.

    Waits for all of them, on however many machines. ``timeout_s``: how long the other parties wait
    for a step of this one. At the end, and when rank 0 fails with an error
    of ours, rank 0 ends the others with a word. If rank 0 ends otherwise, its connections close,
    and that ends them. Raises InputError under a rendezvous that runs code of others.
    """
    rank, size, _ = read_launch()
    if rank == 0:
        # torchrun ends the others.
        require_static()
    if size == 1:
        yield None
        return
    with _endable(), convert_rank_errors():
        dist.init_process_group("gloo", timeout=timedelta(seconds=_ALL_THERE_S))
        # A timeout below that of the other parties, after which they end the run.
        silent = timedelta(seconds=timeout_s / 2)
        words = dist.new_group(backend="gloo", timeout=silent)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tensors = dist.new_group(backend=backend, timeout=silent)
    assert isinstance(words, dist.ProcessGroup)  # noqa: S101 - every rank is in it
    assert isinstance(tensors, dist.ProcessGroup)  # noqa: S101
    ranks = Ranks(rank, size, device, words, tensors, min(_BEAT_S, timeout_s / 8))
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
    with convert_rank_errors():
        if ranks.rank == 0:
            ranks.tell(Word.END)
        dist.destroy_process_group()
