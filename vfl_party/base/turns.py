"""Lets the parties of one process take turns: one party computes at a time, with its own state of
torch.

Each party is a greenlet, a function that can be paused. A party ends its turn when it waits for a
bundle or for the server. Each party has its own state of torch's global generator. So dropout and
other random operations give the same numbers as in the party's own process, and the order of all
steps is always the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from vfl_common.errors import InternalError
from vfl_common.rpc.exchange.memory import Turns
from vfl_party.base.devices import get_real_dtype, plain_arithmetic, set_threads

_MKLDNN: Any = torch.backends.mkldnn
# Types of devices on which parties compute. torch has a separate autocast setting for each.
_CAST = ("cpu", "cuda")


class _Modes(NamedTuple):
    """The global settings of torch that a party can change, except the random generators.

    ``nested``: The number of enclosing ``torch.autocast`` blocks. torch caches the weights that
    autocast has cast until the outermost block ends.
    """

    grad: bool = True
    dtype: torch.dtype = torch.float32
    nested: int = 0
    # Whether autocast caches the weights that it has cast.
    cached: bool = True
    # For each device type of _CAST, whether autocast is enabled, and its dtype.
    cast: tuple[tuple[bool, torch.dtype], ...] = ((False, torch.bfloat16), (False, torch.float16))
    mkldnn: bool = True

    @classmethod
    def read(cls) -> _Modes:
        """Returns the current settings of torch."""
        torch.autocast_increment_nesting()
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.autocast_decrement_nesting(),
            torch.is_autocast_cache_enabled(),
            tuple(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _CAST
            ),
            _MKLDNN.enabled,
        )

    def apply(self) -> None:
        """Applies these settings to torch, and clears the cache of cast weights."""
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype)
        while torch.autocast_increment_nesting() <= self.nested:
            pass
        while torch.autocast_decrement_nesting() > self.nested:
            pass
        torch.set_autocast_cache_enabled(self.cached)
        for kind, (on, dtype) in zip(_CAST, self.cast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.clear_autocast_cache()
        _MKLDNN.enabled = self.mkldnn


@dataclass(eq=False)
class _Player:
    """A party that takes turns. ``helps``: Whether a round may end before this party's function has
    ended.
    """

    name: str
    body: greenlet
    helps: bool
    generators: list[Tensor]
    modes: _Modes
    # The condition that the party waits for.
    is_so: Callable[[], object] = field(default=lambda: True)


class TakingTurns(Turns):
    """Runs all parties of a run by turns, in the thread that calls ``play``.

    Args:
        devices: The devices on which parties compute. The states of their generators are saved and
            restored too.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._players: deque[_Player] = deque()
        self._on_turn: _Player | None = None
        # The greenlet in which ``play`` chooses the next party.
        self._home = getcurrent()
        # The party whose state torch currently has.
        self._last: _Player | None = None

    def join(self, name: str, act: Callable[[], None], *, helps: bool = False) -> None:
        """Adds ``act`` to the functions that take turns. ``act`` must not raise. ``helps``: Whether
        the round may end before ``act`` has ended.
        """
        body = greenlet(act, self._home)
        # A greenlet does not inherit context variables, which hold the plug-ins of the run.
        body.gr_context = contextvars.copy_context()
        self._players.append(_Player(name, body, helps, self._get_generators(), _Modes.read()))

    def play(self) -> None:
        """Runs all parties by turns until every party without ``helps`` has ended.

        Raises InternalError if all parties wait. The caller then ends the conditions that they wait
        for, and calls ``play`` again.
        """
        self._home = getcurrent()
        while not all(player.helps for player in self._players):
            for player in self._players:
                if player.is_so():
                    break
            else:
                names = ", ".join(player.name for player in self._players)
                raise InternalError(
                    f"{names}: all parties wait for messages, because a method waits for a message "
                    "that no party sends"
                )
            self._players.remove(player)
            self._restore(player)
            self._on_turn = player
            player.body.switch()
            self._on_turn = None
            if not player.body.dead:
                self._players.append(player)

    def run_isolated(self, act: Callable[[], None]) -> None:
        """Calls ``act`` in a party's turn, then restores torch's state, so that random numbers
        drawn by ``act`` do not change the run.
        """
        generators, modes = self._get_generators(), _Modes.read()
        try:
            act()
        finally:
            self._set_generators(generators)
            modes.apply()

    def wait_for(
        self, condition: threading.Condition, is_so: Callable[[], object], timeout_s: float
    ) -> bool:
        """Waits until ``is_so`` is true, without a time limit. Other parties take their turns
        meanwhile.
        """
        me = self._on_turn
        if me is None or me.body is not getcurrent():
            return super().wait_for(condition, is_so, timeout_s)
        if not is_so():
            me.is_so = is_so
            self._home.switch()
        return True

    def _restore(self, player: _Player) -> None:
        """Saves torch's state for the previous party, and restores the state of ``player``."""
        last, self._last = self._last, player
        if last is player:
            return
        modes = _Modes.read()
        if last is not None and not last.body.dead:
            last.generators, last.modes = self._get_generators(), modes
        self._set_generators(player.generators)
        # Outside of autocast blocks, torch has no cast weights that a player could confuse.
        if modes.nested or modes != player.modes:
            player.modes.apply()

    def _set_generators(self, generators: Sequence[Tensor]) -> None:
        torch.default_generator.set_state(generators[0])
        for device, state in zip(self._devices, generators[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _get_generators(self) -> list[Tensor]:
        cpu = torch.default_generator.get_state()
        return [cpu, *map(torch.cuda.get_rng_state, self._devices)]


@contextlib.contextmanager
def isolate_torch(threads: int, devices: Sequence[torch.device]) -> Iterator[TakingTurns]:
    """Runs the block with torch in the state of a new process, with ``threads`` threads. Restores
    the previous state afterwards.
    """
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    threads_before, modes_before = torch.get_num_threads(), _Modes.read()
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.random.fork_rng(devices=gpus))
        modes.enter_context(torch.inference_mode(False))
        # A default device slows down every call of torch, so it is set only if needed.
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.callback(plain_arithmetic())
        try:
            _Modes(dtype=get_real_dtype(), mkldnn=modes_before.mkldnn).apply()
            set_threads(threads)
            yield TakingTurns(devices)
        finally:
            torch.set_num_threads(threads_before)
            modes_before.apply()
