"""Turns SIGINT and SIGTERM into exceptions of the main thread, which pass all error handlers.

None is raised inside an import, where it can be lost, or leave a module half imported; some
libraries end the process when their import fails.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM)
# A signal that is ignored by default, and has no other use here.
_NUDGE = signal.SIGURG
# Pauses before each interruption of a wait: on a busy machine the wait may begin late.
_PAUSES_S = (0.05, 0.5, 2.0)
# A signal interrupts an import that takes longer, for example from a slow disk.
_IMPORT_S = 2.0


class Stopped(BaseException):
    """The exception of SIGTERM, which passes all error handlers as that of Ctrl-C does. Its text,
    if any, is for the person.
    """


class _Stop:
    """The requested stop. ``number``: the signal that has not raised an exception yet, or 0."""

    number = 0
    asked = False
    since_s = 0.0


_stop = _Stop()


def install_silent_end() -> None:
    """Makes both signals end the process silently, until ``install_handlers`` is called: a program
    that is still being imported has nothing to undo.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def install_handlers() -> None:
    """Makes both signals raise KeyboardInterrupt and Stopped in the main thread, even if it begins
    to wait at the same moment.

    The interpreter calls a signal's handler between two steps of the main thread. A wait that
    begins after the last of them is not interrupted, and may be long. So each signal also wakes a
    thread, which soon interrupts the wait. That thread also repeats a signal that came inside an
    import.
    """
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    signal.signal(_NUDGE, _raise_pending)
    signal.signal(signal.SIGTERM, _handle)
    # A shell has its background programs ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _handle)
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


def set_on_signal(ended: threading.Event) -> None:
    """Makes both signals only set ``ended`` from now on, because the process ends anyway."""
    for number in ENDS:
        signal.signal(number, lambda _signal, _frame: ended.set())
    # A signal may still wait for the end of an import.
    _stop.number = 0


def is_stopping() -> bool:
    """Returns whether one of both signals has come since ``install_handlers``."""
    return _stop.asked


def _handle(number: int, frame: FrameType | None) -> None:
    if not _stop.number:
        _stop.since_s = time.monotonic()
    _stop.number, _stop.asked = number, True
    _raise_pending(number, frame)


def _raise_pending(_number: int, frame: FrameType | None) -> None:
    """Raises the exception of a pending signal, unless the main thread is inside an import."""
    if not _stop.number or (_imports(frame) and time.monotonic() - _stop.since_s < _IMPORT_S):
        return
    number, _stop.number = _stop.number, 0
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def _imports(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` is part of an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
