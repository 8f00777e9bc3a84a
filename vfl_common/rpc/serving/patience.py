"""Decides whether requests wait for a party. A party that misses several questions is away until it
answers a question in time. Without this rule, each request would wait for a suspended party until
its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

# The number of consecutive questions without an answer after which a party is away.
MAX_LATE = 3
# The maximum number of consecutive probes that a party must answer in time.
MAX_PROBES = 64


@dataclass
class AnswerPatience:
    """Tracks the patience with one stream of a party. One thread at a time may use it. Times are
    monotonic.

    A party that is away gets some questions as probes. Once it has answered enough probes in time,
    it is on probation: if it misses the next question, it must answer twice as many consecutive
    probes. So a party that answers only probes makes fewer and fewer requests wait.
    """

    _num_late: int = 0
    # The time of the last answer.
    _answered_s: float = 0.0
    # The number of the open probe (0 if there is none), and the time until which an answer to it
    # counts.
    _probe: int = 0
    _probe_until_s: float = 0.0
    # The number of consecutive probes that were answered in time, and the number that is needed.
    _num_good_probes: int = 0
    _num_needed_probes: int = 1

    @property
    def waits(self) -> bool:
        """Whether requests wait for the party's answers."""
        return self._num_late < MAX_LATE

    def note_late(self, asked_s: float, waiting: int) -> bool:
        """Counts a question, asked at ``asked_s``, that had no answer in time. Returns whether the
        party is away from now on.

        ``waiting``: the number of questions that still wait for an answer. If the party has
        answered no question since ``asked_s``, they also count as late.
        """
        was_present = self.waits
        if was_present and self._num_good_probes:
            # The party was on probation.
            self._num_late, self._num_good_probes = MAX_LATE - 1, 0
            self._num_needed_probes = min(2 * self._num_needed_probes, MAX_PROBES)
        self._num_late += 1
        if self._answered_s < asked_s and self._num_late + waiting >= MAX_LATE:
            self._num_late = MAX_LATE
        return was_present and not self.waits

    def probes(self, number: int, now_s: float, until_s: float) -> bool:
        """Returns whether to send the question ``number`` as a probe, which is the case if no other
        probe is open.
        """
        if self._probe and now_s < self._probe_until_s:
            return False
        # If there was a previous probe, it had no answer.
        self._num_good_probes = 0 if self._probe else self._num_good_probes
        self._probe, self._probe_until_s = number, until_s
        return True

    def note_answer(self, number: int, now_s: float, *, waited_for: bool) -> bool:
        """Counts an answer. Returns whether requests wait for the party again.

        ``waited_for``: whether the answer came in time and was not to a probe.
        """
        was_away, self._answered_s = not self.waits, now_s
        if waited_for:
            self._num_late, self._num_good_probes, self._num_needed_probes = 0, 0, 1
        elif number == self._probe and now_s < self._probe_until_s:
            self._num_good_probes += 1
            self._num_late = (
                0 if self._num_good_probes >= self._num_needed_probes else self._num_late
            )
        elif was_away:
            self._num_good_probes = 0
        # The party is alive, so the next question may be a probe again.
        self._probe = 0
        return was_away and self.waits
