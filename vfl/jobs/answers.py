"""What a process answers to an order: nothing, or what went wrong."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from typing import Any

from vfl_common.errors import Code, InternalError, VflError

# JSON's values only.
Order = dict[str, Any]
Answer = dict[str, Any]

# Of a process that is given several orders at a time, such as one of Dask with several threads.
_ONE = threading.Lock()
# After which a process looks whether its parent is there.
_TICK_S = 0.5


class WorkerTraceback(Exception):  # noqa: N818 - it says what it is
    """The traceback of an error in another process, as text: the cause of the error that is raised
    here.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer(does: str, order: Order) -> Answer:
    """Carries out an order in this process, one at a time. ``does``: ``module:function``; the
    function takes the order. Returns an empty dict, or what went wrong.
    """
    try:
        module, _, name = does.partition(":")
        with _ONE:
            getattr(importlib.import_module(module), name)(order)
    except BaseException as error:  # noqa: BLE001 - raised by the other process
        found = (
            error
            if isinstance(error, VflError)
            else InternalError(f"{type(error).__name__}: {error}")
        )
        text = "".join(traceback.format_exception(error))
        return {"code": found.code, "text": str(found), "party": found.party, "traceback": text}
    return {}


def watch(parent: int) -> None:
    """Lets this process end when the one that started it does. ``parent``: that one's id."""
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    # Nobody waits for the run any more.
    os._exit(1)


def check(answered: Answer) -> None:
    """Raises VflError if an answer tells of an error, with the traceback of the other process."""
    if answered:
        cause = WorkerTraceback(answered["traceback"])
        raise VflError(Code(answered["code"]), answered["text"], party=answered["party"]) from cause


def lost(how: str, whose: str = "the study") -> VflError:
    """Returns the error of an order whose process has ended. ``how``: as in ``was killed by
    SIGKILL``.
    """
    text = (
        f"a process of {whose} {how}, so its run is not finished; if memory was short, set fewer "
        "jobs"
    )
    return VflError(Code.PARTY_LOST, text)
