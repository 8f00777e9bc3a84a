"""Limits how many of a peer's messages are shown or logged, so that no peer can fill a screen or a
disk.
"""

from __future__ import annotations

import threading


class Rate:
    """Passes ``at_once`` messages of each sender at first, then one every ``every_s``; counts the
    others.

    Any thread may call it. Senders are names in certificates, so they are few.
    """

    def __init__(self, every_s: float, at_once: int) -> None:
        self._every_s, self._ahead_s = every_s, every_s * (at_once - 1)
        self._lock = threading.Lock()
        # {sender: when its next message is due at an even rate}
        self._next_s: dict[str, float] = {}
        # {sender: the count of messages held back since the last that passed}
        self._held: dict[str, int] = {}

    def passes(self, sender: str, now_s: float) -> int | None:
        """Returns None if this message is held back; else the count of those held back since the
        sender's last message that passed.
        """
        with self._lock:
            due_s = max(self._next_s.get(sender, now_s), now_s)
            if due_s - now_s > self._ahead_s:
                self._held[sender] = self._held.get(sender, 0) + 1
                return None
            self._next_s[sender] = due_s + self._every_s
            return self._held.pop(sender, 0)


def append_held_count(text: str, held: int) -> str:
    """Appends the count of messages held back: ``collapsing (and 37 more)``."""
    return f"{text} (and {held} more)" if held else text
