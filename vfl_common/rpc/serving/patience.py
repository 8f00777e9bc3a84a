"""Decides whether requests wait for a party: one that misses questions is away until it answers one
in time. Otherwise each request waits for a party that is suspended until its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

# The count of consecutive questions without an answer after which a party is away.
MAX_LATE = 3
# The most consecutive probes that a party must answer in time.
MAX_PROBES = 64


@dataclass
class AnswerPatience:
    """The patience with one stream of a party, for one thread at a time. Times are monotonic.

    A party that is away gets a question now and then, as a probe. Once it has answered one in time,
    it is on trial: if it misses the next question, it must answer twice as many consecutive probes.
    So a party that answers only probes makes fewer and fewer requests wait.
    """

    _late: int = 0
    # The time of the last answer.
    _answered_s: float = 0.0
    # The number of the open probe (0: none), and until when an answer to it counts.
    _probe: int = 0
    _until_s: float = 0.0
    # The count of consecutive probes answered in time, and how many are needed.
    _good: int = 0
    _wanted: int = 1

    @property
    def waits(self) -> bool:
        """Whether requests wait for the party's answers."""
        return self._late < MAX_LATE

    def note_late(self, asked_s: float, waiting: int) -> bool:
        """Notes that a question of the time ``asked_s`` had no answer in time; returns whether the
        party is away from now on.

        ``waiting``: the count of questions that still wait for an answer. If the party has answered
        none since ``asked_s``, they count as late, too.
        """
        waited = self.waits
        if waited and self._good:
            # The party was on trial.
            self._late, self._good = MAX_LATE - 1, 0
            self._wanted = min(2 * self._wanted, MAX_PROBES)
        self._late += 1
        if self._answered_s < asked_s and self._late + waiting >= MAX_LATE:
            self._late = MAX_LATE
        return waited and not self.waits

    def probes(self, number: int, now_s: float, until_s: float) -> bool:
        """Returns whether to send the question ``number`` as a probe: if no other probe is open."""
        if self._probe and now_s < self._until_s:
            return False
        # The previous probe, if any, had no answer.
        self._good = 0 if self._probe else self._good
        self._probe, self._until_s = number, until_s
        return True

    def note_answer(self, number: int, now_s: float, *, waited_for: bool) -> bool:
        """Notes an answer; returns whether requests wait for the party again.

        ``waited_for``: whether it came in time to a question that is not a probe.
        """
        away, self._answered_s = not self.waits, now_s
        if waited_for:
            self._late, self._good, self._wanted = 0, 0, 1
        elif number == self._probe and now_s < self._until_s:
            self._good += 1
            self._late = 0 if self._good >= self._wanted else self._late
        elif away:
            self._good = 0
        # The party is alive, so the next question is a probe again.
        self._probe = 0
        return away and self.waits
