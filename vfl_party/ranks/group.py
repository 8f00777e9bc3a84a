"""Exchanges messages between the processes of one party: commands from rank 0, answers to rank 0,
and tensors in both directions.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.signals import Stopped
from vfl_party.base.devices import read_launch

log = logging.getLogger(__name__)

# The timeout for the next command. It can be long, because torchrun ends all processes if one dies.
_NO_TIMEOUT = timedelta(days=365)
# The seconds in which all processes must start.
_START_S = 120
# The seconds between two signs of life of a working rank.
_BEAT_S = 5.0
# Texts by which errors of gloo, which are plain RuntimeErrors, are recognized: its source folder,
# or an earlier timeout.
_GLOO_TEXTS = ("/gloo/", "pair closure")


class Word(IntEnum):
    """Commands of rank 0 to the other ranks."""

    # Begin a generation: prepare these rows, and report their digest.
    BEGIN = 1
    # Make another encoder.
    ENCODER = 2
    # Make an augmentation that draws random views.
    VIEWS = 3
    # Embed your share of a batch.
    FORWARD = 4
    # Receive the gradient of the last embeddings.
    BACKWARD = 5
    END = 6


# Arrays of row positions or of bytes. They never contain values of a row.
IntegerArray = npt.NDArray[np.int64] | npt.NDArray[np.uint8]


class RankLost(Stopped):
    """Raised if another process of this party has ended. The run has not failed. Restart the party
    to resume it.
    """


@contextmanager
def convert_rank_errors() -> Iterator[None]:
    """Converts torch's errors about broken connections inside the block into RankLost. Other errors
    pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if not (
            isinstance(error, dist.DistError) or any(mark in str(error) for mark in _GLOO_TEXTS)
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


def divide_rows(rows: int, ranks: int) -> list[int]:
    """Divides rows among ranks as evenly as possible, and returns the number for each rank. The
    first ranks get one more row if needed. A rank may get no rows.
    """
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def pack(facts: dict[str, Any], arrays: Sequence[IntegerArray]) -> Tensor:
    """Encodes facts and arrays of integers as bytes, uint8 [S]. Raises TypeError for an array of
    another type, because values of rows must not be sent.
    """
    for array in arrays:
        if array.dtype not in (np.int64, np.uint8):
            raise TypeError(f"an array of {array.dtype} cannot be sent to other ranks")
    head = json.dumps([facts, [[array.dtype.str, len(array)] for array in arrays]]).encode()
    parts = [len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def unpack(body: Tensor) -> tuple[dict[str, Any], list[IntegerArray]]:
    """Decodes the facts and arrays that ``pack`` encoded."""
    data = body.numpy()
    # The arrays are copied, because torch warns about arrays that are not writable.
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    facts, kinds = json.loads(data[8:at].tobytes())
    arrays: list[IntegerArray] = []
    for kind, count in kinds:
        end = at + count * np.dtype(kind).itemsize
        arrays.append(np.frombuffer(bytearray(data[at:end]), kind))
        at = end
    return facts, arrays


@dataclass(frozen=True)
class Ranks:
    """The group of a party's processes, as seen by one of them.

    ``words``: The gloo group for commands. ``tensors``: The group for tensors (NCCL between GPUs).
    Both time out after half of the step timeout, except while waiting for the next command.
    ``beat_s``: The seconds between two signs of life of a working rank.
    """

    rank: int
    size: int
    device: torch.device
    words: dist.ProcessGroup
    tensors: dist.ProcessGroup
    beat_s: float

    def send_command(
        self, word: Word, facts: dict[str, Any] | None = None, arrays: Sequence[IntegerArray] = ()
    ) -> None:
        """Sends a command from rank 0 to all other ranks, with facts as JSON and arrays of
        integers.
        """
        body = pack(facts or {}, arrays)
        self._broadcast(torch.tensor([word, len(body)]))
        self._broadcast(body)

    def receive_command(self) -> tuple[Word, dict[str, Any], list[IntegerArray]]:
        """Waits, at a rank other than 0, for the next command. Returns the command with its facts
        and arrays.
        """
        word, size = self._broadcast(torch.zeros(2, dtype=torch.int64), _NO_TIMEOUT)
        return Word(int(word)), *unpack(self._broadcast(torch.empty(int(size), dtype=torch.uint8)))

    def _broadcast(self, message: Tensor, timeout: timedelta | None = None) -> Tensor:
        how = dist.BroadcastOptions()
        if timeout is not None:
            how.timeout = timeout
        self.words.broadcast([message], how).wait()
        return message

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs a block at all ranks at the same time, and waits at its end until the blocks of all
        ranks have ended.

        A block may take any time, because a thread sends signs of life meanwhile. Raises an error
        of torch if a rank is silent for half of the step timeout.
        """
        ended, failed = threading.Event(), list[RuntimeError]()

        def send_signs_of_life() -> None:
            at_work = torch.ones(1)
            try:
                while at_work.item():
                    at_work.fill_(not ended.wait(self.beat_s))
                    dist.all_reduce(at_work, group=self.words)
            except RuntimeError as error:
                failed.append(error)

        # If the block fails, the process ends without waiting for the thread.
        thread = threading.Thread(target=send_signs_of_life, name="at work", daemon=True)
        thread.start()
        yield
        ended.set()
        thread.join()
        if failed:
            raise failed[0]

    def exchange_facts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges facts between all ranks, which must all call this. Returns the facts of each
        rank, by rank.
        """
        body = pack(facts, ())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(body)]), group=self.words)
        longest = int(max(sizes))
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.cat([body, torch.zeros(longest - len(body), dtype=torch.uint8)])
        dist.all_gather(bodies, padded, group=self.words)
        return [unpack(part[: int(size)])[0] for part, size in zip(bodies, sizes, strict=True)]

    def send(self, parts: Sequence[Tensor], receivers: Sequence[int]) -> None:
        """Sends one tensor to each of the ranks ``receivers``. Skips empty tensors."""
        works = [
            dist.isend(part.detach().contiguous(), rank, group=self.tensors)
            for part, rank in zip(parts, receivers, strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    def receive(self, parts: Sequence[Tensor], senders: Sequence[int]) -> None:
        """Receives one tensor from each of the ranks ``senders`` into ``parts``. Skips empty
        tensors.
        """
        works = [
            dist.irecv(part, rank, group=self.tensors)
            for part, rank in zip(parts, senders, strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None  # noqa: S101 - this rank is in the group
            work.wait()

    @torch.no_grad()
    def spread(self, module: nn.Module) -> None:
        """Broadcasts rank 0's weights and buffers to all ranks, in one message for each dtype."""
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
            dist.broadcast(flat, src=0, group=self.tensors)
            if self.rank:
                for tensor, part in zip(
                    same_dtype,
                    torch.split(flat, [tensor.numel() for tensor in same_dtype]),
                    strict=True,
                ):
                    tensor.copy_(part.view_as(tensor))


@contextmanager
def join_ranks(device: torch.device, timeout_s: float) -> Iterator[Ranks | None]:
    """Joins the processes that torchrun has started for this party, and yields their group. Yields
    None if the party has only one process.

    Waits for the processes on all machines. ``timeout_s``: The step timeout of the other parties.
    At the end, and after a VflError, rank 0 sends the END command to the other ranks. If rank 0
    ends in another way, its connections close, which ends the other ranks. Raises InputError under
    a rendezvous that can run code from the network.
    """
    rank, size, _ = read_launch()
    if rank == 0:
        # If this raises, torchrun ends the other processes.
        require_static()
    if size == 1:
        yield None
        return
    with _allow_sigterm(), convert_rank_errors():
        dist.init_process_group("gloo", timeout=timedelta(seconds=_START_S))
        # The timeout is below the step timeout, after which the other parties would end the run.
        timeout = timedelta(seconds=timeout_s / 2)
        words = dist.new_group(backend="gloo", timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tensors = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(words, dist.ProcessGroup)  # noqa: S101 - every rank is in it
    assert isinstance(tensors, dist.ProcessGroup)  # noqa: S101
    ranks = Ranks(rank, size, device, words, tensors, min(_BEAT_S, timeout_s / 8))
    try:
        yield ranks
    except VflError:
        # The error was raised between two commands, so END can be sent.
        _end_group(ranks)
        raise
    _end_group(ranks)


@contextmanager
def _allow_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the process at once inside the block, in which torch waits without calling
    Python's signal handlers.
    """
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _end_group(ranks: Ranks) -> None:
    with convert_rank_errors():
        if ranks.rank == 0:
            ranks.send_command(Word.END)
        dist.destroy_process_group()


# Checks the rendezvous with which torchrun's processes find each other.
#
# The state of torch's c10d rendezvous is a pickle in a store that listens on all addresses of the
# host without authentication. So anyone who reaches its port can run code in torchrun, as the
# party's user. A loopback endpoint does not prevent this. torchrun uses this rendezvous with
# ``--standalone``, and on one host also without ``--master-port``. The store of the static
# rendezvous contains no pickle.

_PROGRAMS = ("torchrun", "torch.distributed.run")


# The maximum number of shells between torchrun and this process.
_MAX_SHELLS = 8


def require_static() -> None:
    """Raises InputError if torchrun has started this process under a rendezvous that unpickles data
    from the network.
    """
    if not torch.distributed.is_torchelastic_launched():
        return
    backend = read_backend(_find_launcher())
    if backend == "static":
        return
    raise InputError(
        Code.CONFIG_INVALID,
        "torchrun: this rendezvous lets anyone who reaches its port run code here (got "
        f"{backend}). Set --master-addr 127.0.0.1 and a free --master-port in place of "
        "--standalone or --rdzv-backend; with several hosts, set the first one's address and "
        "--node-rank, on a network of these hosts only.",
    )


def read_backend(command: Sequence[str]) -> str:
    """Returns the backend of the rendezvous that a torchrun command uses, with the ``PET_``
    variables of the environment. A command of another program counts as static, unless these
    variables name a backend.
    """
    # This module takes long to import, and most parties have one process and do not need it.
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    index = _find_torchrun(command)
    words = [*command[index + 1 :]] if index is not None else ["none"]
    try:
        # The parser raises SystemExit at an unknown option.
        with contextlib.redirect_stderr(io.StringIO()):
            args = get_args_parser().parse_args(words)
    except SystemExit:
        return "static"
    if args.standalone:
        return "c10d"
    is_one_host = index is not None and parse_min_max_nnodes(args.nnodes)[1] == 1
    if args.rdzv_backend == "static" and is_one_host and not args.rdzv_endpoint:
        return "static" if args.master_port is not None else "c10d"
    return str(args.rdzv_backend)


def _find_torchrun(command: Sequence[str]) -> int | None:
    """Returns the index of torchrun in a command, after which its options begin; None if it is the
    command of another program.
    """
    names = [Path(word).name for word in command]
    return next((names.index(program) for program in _PROGRAMS if program in names), None)


def _find_launcher() -> list[str]:
    """Returns the command of the torchrun that has started this process, directly or through
    shells; empty if there is none, or if the system does not show commands.
    """
    pid = os.getppid()
    for _ in range(_MAX_SHELLS):
        try:
            data = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        command = [word.decode(errors="replace") for word in data.rstrip(b"\0").split(b"\0")]
        # A shell's command may name torchrun in one long word.
        if _find_torchrun(command) is not None:
            return command
        pid = int(status.partition("PPid:")[2].split()[0])
    return []
