"""Whether a party is waited for: one that lets questions pass is away until it answers one in time.

Otherwise each request would wait as long as a frozen party may take.
"""

from __future__ import annotations

from dataclasses import dataclass

# Questions in a row without an answer.
MOST_LATE = 3


@dataclass
class Patience:
    """With one stream of a party; for one thread at a time. Times are those of ``time.monotonic``.

    A party that is not waited for gets a question now and then, as a probe.
    """

    _late: int = 0
    # When it answered last.
    _answered_s: float = 0.0
    # The number of the probe under way (0: none), and until when it is worth something.
    _probe: int = 0
    _until_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the party's answers are waited for."""
        return self._late < MOST_LATE

    def late(self, asked_s: float, waiting: int) -> bool:
        """Notes that a question of the moment ``asked_s`` had no answer in time; returns whether
        the party is not waited for any more.

        ``waiting``: questions that wait for an answer yet. If it has answered none since, they
        count as late, too.
        """
        waited = self.waits
        self._late += 1
        if self._answered_s < asked_s and self._late + waiting >= MOST_LATE:
            self._late = MOST_LATE
        return waited and not self.waits

    def probes(self, number: int, now_s: float, until_s: float) -> bool:
        """Returns whether the question ``number`` is sent as a probe: if no other is under way."""
        if self._probe and now_s < self._until_s:
            return False
        self._probe, self._until_s = number, until_s
        return True

    def answered(self, number: int, now_s: float, *, waited_for: bool) -> bool:
        """Notes an answer; returns whether the party is waited for again.

        ``waited_for``: whether it came in time to a question that is no probe.
        """
        away, self._answered_s = not self.waits, now_s
        if waited_for or (number == self._probe and now_s < self._until_s):
            self._late = 0
        # It is alive: the next question shows whether it is in time again.
        self._probe = 0
        return away and self.waits
