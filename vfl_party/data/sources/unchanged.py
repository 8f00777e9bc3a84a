"""Detects that a file is written or replaced while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.config.sources import split_member
from vfl_party.data import checks

State = tuple[int, int, int]


def state_of(source: str) -> State:
    """Returns the inode, the size and the modification time of a file. Raises InputError if the
    file does not exist.
    """
    try:
        state = Path(split_member(source)[0]).stat()
    except OSError:
        raise checks.unreadable(
            source, "was deleted while it was read. Restore it, and start again."
        ) from None
    return state.st_ino, state.st_size, state.st_mtime_ns


@contextmanager
def require_unchanged(source: str, before: State) -> Iterator[None]:
    """Raises InputError if a file has changed before the block or during the block."""
    require_same(source, before)
    yield
    require_same(source, before)


def require_same(source: str, before: State) -> None:
    """Raises InputError if the state of a file differs from ``before``."""
    if state_of(source) != before:
        raise checks.unreadable(
            source, "was changed while it was read. Start again when nobody writes to it."
        )
