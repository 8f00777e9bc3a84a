"""Torch's generators for parties that are threads of one process: each draws as it would in a process of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vfl_common.rpc.memory import Turns
from vfl_party.devices import set_threads


class OwnDraws(Turns):
    """Lets one party compute at a time, and gives it torch's generators in the state in which it left them.

    Dropout, and whatever else draws from torch's global generator, then draws what it would draw in the party's own
    process.

    Args:
        devices: the GPUs on which parties compute; their generators are kept, too.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._kept: dict[int, list[Tensor]] = {}  # {a thread that takes turns: its generators' states}
        self._last: int | None = None  # the thread whose states the generators have

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the lock as one of the threads that take turns, until the block ends or waits."""
        with self.lock:
            self._kept[threading.get_ident()] = self._states()
            self._begin()
            try:
                yield
            finally:
                del self._kept[threading.get_ident()]
                self._last = None

    def wait_for(self, condition: threading.Condition, is_so: Callable[[], object], timeout_s: float) -> bool:
        found = super().wait_for(condition, is_so, timeout_s)
        self._begin()
        return found

    def _begin(self) -> None:
        """Puts this thread's states into the generators, if another thread has had its turn."""
        me = threading.get_ident()
        if me not in self._kept or me == self._last:
            return
        if self._last in self._kept:
            self._kept[self._last] = self._states()
        cpu, *others = self._kept[me]
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, others, strict=True):
            torch.cuda.set_rng_state(state, device)
        self._last = me

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]


@contextlib.contextmanager
def alone(threads: int, devices: Sequence[torch.device]) -> Iterator[OwnDraws]:
    """Gives the block torch as a process of its own would have it, with ``threads``; gives it back as it was."""
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    before, dtype, mkldnn = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.enabled
    with torch.random.fork_rng(devices=gpus):
        try:
            torch.set_default_dtype(torch.float32)
            set_threads(threads)
            yield OwnDraws(devices)
        finally:
            torch.set_num_threads(before)
            torch.set_default_dtype(dtype)
            torch.backends.mkldnn.enabled = mkldnn
