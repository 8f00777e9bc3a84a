"""How many files, and so how many connections, a process that listens may have open.

Every connection is an open file, before its caller has shown a certificate. Without a bound a
stranger uses all files up; then the process can neither write its own nor accept a party.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource

# The usual soft limit.
_FEW_FILES = 1024
_ENOUGH_FILES = 65_536
# Connections beside those of the parties; more would slow down every poll of the process.
_STRANGERS = 1000
# malloc.h.
_M_ARENA_MAX = -8

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raises this process's limit of open files to what it may and can use; returns the limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_ENOUGH_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = min(hard, _ENOUGH_FILES)
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            soft = most
        except (OSError, ValueError):
            # macOS allows less than it says.
            pass
    if soft < _FEW_FILES:
        log.warning(
            "this process may open %d files only; allow it %d or more (ulimit -n)", soft, _FEW_FILES
        )
    return soft


def share_arenas() -> None:
    """Lets all threads share two of glibc's arenas: gRPC starts threads while strangers call, and
    each would keep some.

    To be called before threads start. A setting in the environment (``MALLOC_ARENA_MAX``) takes
    precedence.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def most_connections(streams: int, files: int) -> int:
    """Returns how many connections to accept at once; the parties' ``streams`` may need one each.

    At least half of the ``files`` remain for the process itself.
    """
    return min(streams + _STRANGERS, files // 2)
