"""Whether a party is waited for: one that lets questions pass is away until it answers one in time.

Otherwise each request would wait as long as a frozen party may take.
"""

from __future__ import annotations

from dataclasses import dataclass

# Questions in a row without an answer.
MOST_LATE = 3
# Probes in a row that a party has to answer in time, at most.
MOST_PROBES = 64


@dataclass
class Patience:
    """With one stream of a party; for one thread at a time. Times are those of ``time.monotonic``.

    A party that is not waited for gets a question now and then, as a probe. Once it has answered
    one in time, it is on trial: if it lets the next question pass that is waited for, it has to
    answer twice as many probes in a row. So a party that answers nothing but probes makes ever
    fewer requests wait.
    """

    _late: int = 0
    # When it answered last.
    _answered_s: float = 0.0
    # The number of the probe under way (0: none), and until when it is worth something.
    _probe: int = 0
    _until_s: float = 0.0
    # Probes that it has answered in time in a row, and how many it has to.
    _good: int = 0
    _wanted: int = 1

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
        if waited and self._good:
            # On trial.
            self._late, self._good = MOST_LATE - 1, 0
            self._wanted = min(2 * self._wanted, MOST_PROBES)
        self._late += 1
        if self._answered_s < asked_s and self._late + waiting >= MOST_LATE:
            self._late = MOST_LATE
        return waited and not self.waits

    def probes(self, number: int, now_s: float, until_s: float) -> bool:
        """Returns whether the question ``number`` is sent as a probe: if no other is under way."""
        if self._probe and now_s < self._until_s:
            return False
        # The one before had no answer.
        self._good = 0 if self._probe else self._good
        self._probe, self._until_s = number, until_s
        return True

    def answered(self, number: int, now_s: float, *, waited_for: bool) -> bool:
        """Notes an answer; returns whether the party is waited for again.

        ``waited_for``: whether it came in time to a question that is no probe.
        """
        away, self._answered_s = not self.waits, now_s
        if waited_for:
            self._late, self._good, self._wanted = 0, 0, 1
        elif number == self._probe and now_s < self._until_s:
            self._good += 1
            self._late = 0 if self._good >= self._wanted else self._late
        elif away:
            self._good = 0
        # It is alive: the next question shows whether it is in time again.
        self._probe = 0
        return away and self.waits
