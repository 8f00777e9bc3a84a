"""Limits the open files, and so the connections, of a listening process.

Every connection is an open file, even before its caller has sent a certificate. Without a limit a
stranger could use up all files, so that the process could neither write its own files nor accept a
party.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource

# The usual soft limit of open files.
_MIN_FILES = 1024
_MAX_FILES = 65_536
# The maximum number of connections of strangers. More connections would slow down every poll.
_MAX_STRANGERS = 1000
# The number of the option M_ARENA_MAX in malloc.h.
_M_ARENA_MAX = -8

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as it is allowed and useful. Returns the
    limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MAX_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, _MAX_FILES)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
        except (OSError, ValueError):
            # The limit stays: macOS allows less than it reports.
            pass
    if soft < _MIN_FILES:
        log.warning(
            "this process may open only %d files. Allow at least %d (ulimit -n).", soft, _MIN_FILES
        )
    return soft


def share_arenas() -> None:
    """Limits glibc to two memory arenas for all threads, because gRPC starts threads for strangers'
    calls and each arena keeps memory.

    Call it before threads start. A setting in the environment (``MALLOC_ARENA_MAX``) takes
    precedence.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def compute_connection_limit(streams: int, files: int) -> int:
    """Returns the maximum number of connections to accept at once. Each of the parties' ``streams``
    may need a connection.

    At least half of the ``files`` remain for the process itself.
    """
    return min(streams + _MAX_STRANGERS, files // 2)
