"""A process's answer to an order: empty, or an error."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from typing import Any

from vfl_common.errors import Code, InternalError, VflError

# Orders and answers have JSON values only.
Order = dict[str, Any]
Answer = dict[str, Any]

# The lock for one order at a time, if a process gets several, such as one of Dask with threads.
_ONE = threading.Lock()
# The interval at which a process checks whether its parent is alive.
_TICK_S = 0.5


class WorkerTraceback(Exception):  # noqa: N818 - it says what it is
    """The traceback of an error in another process, as text: the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer(does: str, order: Order) -> Answer:
    """Carries out an order in this process, one at a time. Returns an empty dict, or the error.

    ``does``: ``module:function``; the function takes the order.
    """
    try:
        module, _, name = does.partition(":")
        with _ONE:
            getattr(importlib.import_module(module), name)(order)
    except BaseException as error:  # noqa: BLE001 - raised by the other process
        reported = (
            error
            if isinstance(error, VflError)
            else InternalError(f"{type(error).__name__}: {error}")
        )
        trace = "".join(traceback.format_exception(error))
        return {
            "code": reported.code,
            "text": str(reported),
            "party": reported.party,
            "traceback": trace,
        }
    return {}


def watch(parent: int) -> None:
    """Ends this process when its parent ends. ``parent``: the parent's process id."""
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    # The run's result is no longer needed.
    os._exit(1)


def check(answered: Answer) -> None:
    """Raises VflError if an answer has an error, with the traceback of the other process."""
    if answered:
        cause = WorkerTraceback(answered["traceback"])
        raise VflError(Code(answered["code"]), answered["text"], party=answered["party"]) from cause


def process_error(how: str, owner: str = "the study") -> VflError:
    """Returns the error of an order whose process has ended. ``how``: as in ``was killed by
    SIGKILL``.
    """
    return VflError(
        Code.PARTY_LOST,
        f"a process of {owner} {how}, so its run is not finished. Set fewer jobs if memory was "
        "short.",
    )
