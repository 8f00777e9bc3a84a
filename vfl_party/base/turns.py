"""Parties of one process take turns: one computes at a time, with torch's state as it left it.

Each party is a greenlet, a function that can stand still in the middle. It gives its turn up when
it waits for a bundle or for the server. Then dropout, and whatever else draws from torch's global
generator, draws what it would draw in the party's own process, and the order of all steps is always
the same.
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
from vfl_party.base.devices import plain_arithmetic, set_threads
from vfl_party.base.dtypes import real

_MKLDNN: Any = torch.backends.mkldnn
# Types of devices on which parties compute, each with an autocast of its own.
_CAST = ("cpu", "cuda")


class _Modes(NamedTuple):
    """What a party can set in torch, besides the generators, for all that its thread or process
    computes next.

    ``nested``: how many ``torch.autocast`` it is in. torch keeps the weights that autocast has cast
    until the outermost one ends, though an optimizer may change them meanwhile.
    """

    grad: bool = True
    dtype: torch.dtype = torch.float32
    nested: int = 0
    # Whether cast weights are cached.
    cached: bool = True
    # The autocast of each type of _CAST.
    cast: tuple[tuple[bool, torch.dtype], ...] = ((False, torch.bfloat16), (False, torch.float16))
    mkldnn: bool = True

    @classmethod
    def now(cls) -> _Modes:
        """Returns the modes that torch is in."""
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

    def set(self) -> None:
        """Gives torch these modes. It drops weights that were cast in other modes."""
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
    """A party that takes turns. ``helps``: no party waits for its end."""

    name: str
    body: greenlet
    helps: bool
    generators: list[Tensor]
    modes: _Modes
    # The condition that it waits for.
    is_so: Callable[[], object] = field(default=lambda: True)


class TakingTurns(Turns):
    """The turns of all parties of one run, in the thread that calls ``play``.

    Args:
        devices: the GPUs on which parties compute; their generators are kept, too.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._players: deque[_Player] = deque()
        self._on_turn: _Player | None = None
        # Where ``play`` chooses who is next.
        self._home = getcurrent()
        # The party whose state torch has.
        self._last: _Player | None = None

    def join(self, name: str, act: Callable[[], None], *, helps: bool = False) -> None:
        """Lets ``act`` take turns with the others. It must not raise. ``helps``: the round may end
        without it.
        """
        body = greenlet(act, self._home)
        # A greenlet does not inherit the plug-ins of the run by itself.
        body.gr_context = contextvars.copy_context()
        self._players.append(_Player(name, body, helps, self._generators(), _Modes.now()))

    def play(self) -> None:
        """Lets all play until those who do not only help have ended.

        Raises InternalError if all wait, each for another. The caller then ends what they wait for,
        and plays again.
        """
        self._home = getcurrent()
        while not all(player.helps for player in self._players):
            for player in self._players:
                if player.is_so():
                    break
            else:
                names = ", ".join(player.name for player in self._players)
                text = (
                    f"{names} all wait; a method waits for a message that its other side never "
                    "sends"
                )
                raise InternalError(text)
            self._players.remove(player)
            self._restore(player)
            self._on_turn = player
            player.body.switch()
            self._on_turn = None
            if not player.body.dead:
                self._players.append(player)

    def aside(self, act: Callable[[], None]) -> None:
        """Calls ``act`` in a party's turn, and gives torch back as it was before: what it draws
        changes no run.
        """
        generators, modes = self._generators(), _Modes.now()
        try:
            act()
        finally:
            self._set(generators)
            modes.set()

    def wait_for(
        self, condition: threading.Condition, is_so: Callable[[], object], timeout_s: float
    ) -> bool:
        """Waits until ``is_so`` is true, without a limit: a waiting party gets its turn as soon as
        it can go on.
        """
        me = self._on_turn
        if me is None or me.body is not getcurrent():
            return super().wait_for(condition, is_so, timeout_s)
        if not is_so():
            me.is_so = is_so
            self._home.switch()
        return True

    def _restore(self, player: _Player) -> None:
        """Gives torch the state in which ``player`` left it, and keeps that of the one before."""
        last, self._last = self._last, player
        if last is player:
            return
        if last is not None and not last.body.dead:
            last.generators, last.modes = self._generators(), _Modes.now()
        self._set(player.generators)
        player.modes.set()

    def _set(self, generators: Sequence[Tensor]) -> None:
        torch.default_generator.set_state(generators[0])
        for device, state in zip(self._devices, generators[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _generators(self) -> list[Tensor]:
        cpu = torch.default_generator.get_state()
        return [cpu, *map(torch.cuda.get_rng_state, self._devices)]


@contextlib.contextmanager
def isolate_torch(threads: int, devices: Sequence[torch.device]) -> Iterator[TakingTurns]:
    """Gives the block torch in the state of a new process, with ``threads``; gives it back as it
    was.
    """
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    threads_before, modes_before = torch.get_num_threads(), _Modes.now()
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.random.fork_rng(devices=gpus))
        modes.enter_context(torch.inference_mode(False))
        # The default device is a mode that slows down every call of torch.
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.callback(plain_arithmetic())
        try:
            _Modes(dtype=real(), mkldnn=modes_before.mkldnn).set()
            set_threads(threads)
            yield TakingTurns(devices)
        finally:
            torch.set_num_threads(threads_before)
            modes_before.set()
