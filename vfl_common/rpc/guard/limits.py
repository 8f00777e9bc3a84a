"""Limits the open files, and so the connections, of a process that listens.

Every connection is an open file, even before its caller has shown a certificate. Without a limit a
stranger uses up all files; then the process can neither write its own files nor accept a party.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource

# The usual soft limit of open files.
_FEW_FILES = 1024
_ENOUGH_FILES = 65_536
# Connections besides those of the parties; more of them slow down every poll of the process.
_STRANGERS = 1000
# The number of this option in malloc.h.
_M_ARENA_MAX = -8

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as allowed and useful; returns the limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_ENOUGH_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, _ENOUGH_FILES)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
        except (OSError, ValueError):
            # macOS allows less than it reports.
            pass
    if soft < _FEW_FILES:
        log.warning(
            "this process may open only %d files. Allow at least %d (ulimit -n).", soft, _FEW_FILES
        )
    return soft


def share_arenas() -> None:
    """Limits glibc to two arenas for all threads: gRPC starts threads for strangers' calls, and
    each arena keeps memory.

    Call it before threads start. A setting in the environment (``MALLOC_ARENA_MAX``) takes
    precedence.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def connection_limit(streams: int, files: int) -> int:
    """Returns the most connections to accept at once; each of the parties' ``streams`` may need
    one.

    At least half of the ``files`` remain for the process itself.
    """
    return min(streams + _STRANGERS, files // 2)
