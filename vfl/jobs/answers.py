"""Carries out an order in a worker process, and converts its errors to an answer."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from typing import Any

from vfl_common.errors import Code, InternalError, VflError

# An order and its answer are dicts of JSON values. The answer is empty, or contains an error.
Order = dict[str, Any]
Answer = dict[str, Any]

# Held during an order, because a process with threads, as in Dask, may get several orders at once.
_ORDER_LOCK = threading.Lock()
# The interval at which a process checks whether its parent is alive.
_TICK_S = 0.5


class WorkerTraceback(Exception):  # noqa: N818 - it is used only as a cause
    """The traceback of an error in another process. It is the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer(does: str, order: Order) -> Answer:
    """Carries out an order in this process. Returns an empty dict, or a dict with the error.

    ``does`` names the function that is called with the order, as ``module:function``.
    """
    try:
        module, _, name = does.partition(":")
        with _ORDER_LOCK:
            getattr(importlib.import_module(module), name)(order)
    except BaseException as error:  # noqa: BLE001 - the parent process raises it
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
    """Starts a thread that ends this process when the parent with this process id ends."""
    threading.Thread(target=_end_with_parent, args=[parent], daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    # Without its parent, nobody needs the result of this process.
    os._exit(1)


def check(received: Answer) -> None:
    """Raises VflError if an answer contains an error, with the traceback of the other process."""
    if received:
        cause = WorkerTraceback(received["traceback"])
        raise VflError(Code(received["code"]), received["text"], party=received["party"]) from cause


def process_error(how: str, owner: str = "the study") -> VflError:
    """Returns the error for an order whose process has ended.

    ``how``: A verb phrase such as ``was killed by SIGKILL``. ``owner``: The owner of the process.
    """
    return VflError(
        Code.PARTY_LOST,
        f"a process of {owner} {how}, so its run is not finished. If memory was short, set "
        "fewer jobs.",
    )
