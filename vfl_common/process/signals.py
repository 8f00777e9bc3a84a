"""SIGINT and SIGTERM as exceptions of the main thread, which unwind past all error handlers.

None is raised inside an import. There it can be lost, or leave half a module; some libraries end
the process when their own start fails.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM)
# Which is ignored by default, and nothing else here uses.
_NUDGE = signal.SIGURG
# On a busy machine the wait may begin late.
_PAUSES_S = (0.05, 0.5, 2.0)
# An import that takes longer, from a slow disk, is interrupted.
_IMPORT_S = 2.0


class Stopped(BaseException):
    """SIGTERM as an exception: unwinds like Ctrl-C, past all error handlers. Its text, if any, is
    for the person.
    """


class _Stop:
    """The stop that was asked for. ``number``: of the signal that has raised nothing yet, or 0."""

    number = 0
    asked = False
    since_s = 0.0


_stop = _Stop()


def end_at_once() -> None:
    """Lets both signals end the process silently, until ``heed``: a program that is still being
    imported has nothing to undo.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def heed() -> None:
    """Has both signals raise KeyboardInterrupt and Stopped in the main thread, even if it begins to
    wait just as one comes.

    The interpreter calls a signal's handler between two steps of the main thread. A wait that
    begins after the last of them is not interrupted, and may be long. So each signal also wakes a
    thread, which interrupts the wait soon after. It also comes back to a signal that came inside an
    import.
    """
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    signal.signal(_NUDGE, _again)
    signal.signal(signal.SIGTERM, _come)
    # A shell has its background programs ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _come)
    main = threading.main_thread().ident or 0

    def nudge(_kept_open: socket.socket) -> None:
        while number := read.recv(1):
            for pause_s in _PAUSES_S if number[0] in (*ENDS, signal.SIGHUP) else ():
                time.sleep(pause_s)
                signal.pthread_kill(main, _NUDGE)
                while _stop.number:
                    time.sleep(_PAUSES_S[0])
                    signal.pthread_kill(main, _NUDGE)

    threading.Thread(target=nudge, args=[write], name="signals", daemon=True).start()


def note_in(ended: threading.Event) -> None:
    """Lets both signals only set ``ended`` from now on: the process ends anyway."""
    for number in ENDS:
        signal.signal(number, lambda _signal, _frame: ended.set())
    # Perhaps one waits for the end of an import.
    _stop.number = 0


def asked_to_stop() -> bool:
    """Whether one of both signals has come since ``heed``."""
    return _stop.asked


def _come(number: int, frame: FrameType | None) -> None:
    if not _stop.number:
        _stop.since_s = time.monotonic()
    _stop.number, _stop.asked = number, True
    _again(number, frame)


def _again(_number: int, frame: FrameType | None) -> None:
    """Raises what a signal asks for, unless the main thread is inside an import."""
    if not _stop.number or (_imports(frame) and time.monotonic() - _stop.since_s < _IMPORT_S):
        return
    number, _stop.number = _stop.number, 0
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def _imports(frame: FrameType | None) -> bool:
    """Whether a step of the interpreter is part of an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
