"""Turns SIGINT and SIGTERM into exceptions in the main thread that ``except Exception`` does not
catch.

No such exception is raised inside an import: it could be lost there or leave a module half
imported, and some libraries end the process when their import fails.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM)
# A signal that wakes the main thread. It is ignored by default and has no other use here.
_WAKE_SIGNAL = signal.SIGURG
# The pauses before each attempt to interrupt a wait of the main thread. There are several, because
# on a busy machine the wait may begin late.
_PAUSES_S = (0.05, 0.5, 2.0)
# The maximum time for which an import delays a signal. An import may take longer, for example from
# a slow disk.
_MAX_IMPORT_S = 2.0


class Stopped(BaseException):
    """The exception that SIGTERM raises. Like KeyboardInterrupt, it is not caught by ``except
    Exception``. Its text, if any, is shown to the person.
    """


class _Stop:
    """The state of a requested stop. ``number``: the signal that has not raised its exception yet,
    or 0.
    """

    number = 0
    asked = False
    since_s = 0.0


_stop = _Stop()


def install_silent_end() -> None:
    """Makes SIGINT and SIGTERM end the process silently until ``install_handlers`` is called,
    because a program that is still being imported has nothing to clean up.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def install_handlers() -> None:
    """Makes SIGINT raise KeyboardInterrupt and SIGTERM raise Stopped in the main thread, even if
    that thread begins to wait at the same moment.

    The interpreter calls a signal's handler between two bytecode instructions of the main thread.
    So a signal that arrives just before a system call that waits would not interrupt that wait.
    Therefore each signal also wakes a helper thread, which interrupts the wait soon after. The
    helper thread also repeats a signal that arrived during an import.
    """
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    signal.signal(_WAKE_SIGNAL, _raise_pending)
    signal.signal(signal.SIGTERM, _handle)
    # SIGINT stays ignored if it was: a shell makes its background programs ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _handle)
    main_thread_id = threading.main_thread().ident or 0

    def wake_main_thread(_kept_open: socket.socket) -> None:
        while number := read_end.recv(1):
            for pause_s in _PAUSES_S if number[0] in (*ENDS, signal.SIGHUP) else ():
                time.sleep(pause_s)
                signal.pthread_kill(main_thread_id, _WAKE_SIGNAL)
                while _stop.number:
                    time.sleep(_PAUSES_S[0])
                    signal.pthread_kill(main_thread_id, _WAKE_SIGNAL)

    threading.Thread(target=wake_main_thread, args=[write_end], name="signals", daemon=True).start()


def set_on_signal(ended: threading.Event) -> None:
    """Makes SIGINT and SIGTERM only set ``ended`` from now on, because the process is ending
    anyway.
    """
    for number in ENDS:
        signal.signal(number, lambda _signal, _frame: ended.set())
    # A signal that still waits for the end of an import is dropped.
    _stop.number = 0


def is_stopping() -> bool:
    """Returns whether SIGINT or SIGTERM has arrived since ``install_handlers``."""
    return _stop.asked


def _handle(number: int, frame: FrameType | None) -> None:
    if not _stop.number:
        _stop.since_s = time.monotonic()
    _stop.number, _stop.asked = number, True
    _raise_pending(number, frame)


def _raise_pending(_number: int, frame: FrameType | None) -> None:
    """Raises the exception of a pending signal, unless the main thread is inside an import, or ends
    already because of the signal.
    """
    is_in_import = _is_in_import(frame)
    if not _stop.number or _is_ending(sys.exc_info()[1]):
        return
    if is_in_import and time.monotonic() - _stop.since_s < _MAX_IMPORT_S:
        return
    number = _stop.number
    # A long import may catch the exception. The signal then stays pending, and is raised again.
    if not is_in_import:
        _stop.number = 0
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def _is_ending(error: BaseException | None) -> bool:
    """Returns whether the exception of a signal is being handled."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt | Stopped):
            return True
        error = error.__context__
    return False


def _is_in_import(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` is part of an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
