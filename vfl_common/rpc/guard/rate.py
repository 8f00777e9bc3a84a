"""Limits the number of a peer's messages that are shown or logged, so that no peer can fill a
screen or a disk.
"""

from __future__ import annotations

import threading


class Rate:
    """Limits the messages of each sender: first passes ``at_once`` messages, then one every
    ``every_s`` seconds. Counts the messages that are held back.

    Any thread may call it. Senders are names in certificates, so there are few of them.
    """

    def __init__(self, every_s: float, at_once: int) -> None:
        self._every_s, self._ahead_s = every_s, every_s * (at_once - 1)
        self._lock = threading.Lock()
        # {sender: the time at which its next message is due at an even rate}
        self._next_s: dict[str, float] = {}
        # {sender: the number of messages held back since its last message that passed}
        self._held: dict[str, int] = {}

    def passes(self, sender: str, now_s: float) -> int | None:
        """Returns None if this message is held back. Otherwise returns the number of messages held
        back since the sender's last message that passed.
        """
        with self._lock:
            due_s = max(self._next_s.get(sender, now_s), now_s)
            if due_s - now_s > self._ahead_s:
                self._held[sender] = self._held.get(sender, 0) + 1
                return None
            self._next_s[sender] = due_s + self._every_s
            return self._held.pop(sender, 0)


def append_held_count(text: str, held: int) -> str:
    """Appends the number of messages held back, as in ``collapsing (and 37 more)``."""
    return f"{text} (and {held} more)" if held else text
