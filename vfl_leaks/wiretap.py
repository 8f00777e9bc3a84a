"""Measures what an observer of the network learns from the sizes and times of encrypted messages.

The times are measured in a rehearsal: all parties take turns in one process, so a gap is the work
of all parties. On several machines, parties work at the same time and networks add delays. There
the seconds differ, but the positions of the pauses do not.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vfl_leaks.recording import Passed, Seen, Way
from vfl_leaks.scores import median_and_high
from vfl_party.base.statistics import auc

# Minimum number of answers to call a party slower.
_FEW = 5
# Minimum ratio and difference in seconds to call a party slower.
_CLEAR, _MIN_EXCESS_S = 1.5, 0.001


@dataclass(frozen=True)
class Times:
    """The times of the messages of one exchange in one direction.

    ``gap_s``, ``gap_high_s``: median and 95 % quantile of the seconds between two messages.
    ``tells``: a text that says what the times reveal.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    messages: int
    gap_s: float
    gap_high_s: float
    tells: str

    @property
    def between(self) -> tuple[str, str]:
        """The two gaps, ``gap_s`` and ``gap_high_s``, as texts with units."""
        return format_seconds(self.gap_s), format_seconds(self.gap_high_s)


def read_times(passed: Iterable[Passed], planned: Mapping[str, int]) -> list[Times]:
    """Returns the times and what they reveal, for each exchange and direction with at least two
    messages.

    ``planned``: {phase: its rounds}. The first result of a phase says whether it ended early.
    """
    ways: dict[Way, list[Passed]] = {}
    answers: dict[Way, list[float]] = {}
    # {party: the time of the last message to it}
    came_s: dict[str, float] = {}
    for message in passed:
        ways.setdefault(message.way, []).append(message)
        if message.sender in came_s:
            answers.setdefault(message.way, []).append(message.at_s - came_s[message.sender])
        came_s[message.receiver] = message.at_s
    lines, remaining = list[Times](), dict(planned)
    for way, messages in ways.items():
        if len(messages) > 1:
            gap_s, high_s = median_and_high(_compute_gaps(messages))
            facts = [
                _describe_pauses(messages),
                _describe_early_end(messages, remaining.pop(way[0], 0)),
                _describe_slow_sender(way, answers),
            ]
            lines.append(Times(*way, len(messages), gap_s, high_s, "; ".join(filter(None, facts))))
    return lines


def _compute_gaps(messages: Sequence[Passed]) -> list[float]:
    return [after.at_s - before.at_s for before, after in pairwise(messages)]


def _describe_pauses(messages: Sequence[Passed]) -> str:
    """Returns a text on pauses at the ends of rounds: their length, and how well the longest gaps
    identify the ends (AUC).
    """
    gaps_N = np.array(_compute_gaps(messages))
    ends_N = np.array([after.round != before.round for before, after in pairwise(messages)])
    if not ends_N.any() or ends_N.all():
        return ""
    usual_s, pause_s = statistics.median(gaps_N[~ends_N]), statistics.median(gaps_N[ends_N])
    if pause_s < _CLEAR * usual_s:
        return "no clear pause at the ends of rounds"
    return (
        f"a pause of {format_seconds(pause_s)} at the end of a round, "
        f"{pause_s / max(usual_s, 1e-9):.0f} x a usual gap (AUC {auc(gaps_N, ends_N):.2f})"
    )


def _describe_early_end(messages: Sequence[Passed], planned: int) -> str:
    """Returns a text if the phase ended before its last planned round; otherwise ''."""
    rounds = 1 + max(message.round for message in messages)
    return f"{rounds} of {planned} rounds: it ended early" if rounds < planned else ""


def _describe_slow_sender(way: Way, answers: Mapping[Way, Sequence[float]]) -> str:
    """Returns a text if a sender answers more slowly than others in the same exchange."""
    phase, exchange, sender, receiver = way
    medians_s = [
        statistics.median(delays_s)
        for other, delays_s in answers.items()
        if (*other[:2], other[3]) == (phase, exchange, receiver) and other[2] != sender
    ]
    if not medians_s or len(answers.get(way, ())) < _FEW:
        return ""
    delay_s = statistics.median(answers[way])
    usual_s = statistics.median(medians_s)
    if delay_s < _CLEAR * usual_s or delay_s - usual_s < _MIN_EXCESS_S:
        return ""
    return (
        f"slower than others: it answers after {format_seconds(delay_s)}, others after "
        f"{format_seconds(usual_s)}"
    )


def format_seconds(value: float) -> str:
    """Formats a number of seconds with its unit, such as ``1.2 s`` or ``35 ms``."""
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.2g} ms"


@dataclass(frozen=True)
class MessageSizes:
    """The sizes of the messages of one exchange in one direction.

    ``rounds``: the number of rounds. ``sizes``: (payload bytes, number of messages) pairs.
    ``tells``: a text that says what the sizes reveal.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    rounds: int
    sizes: tuple[tuple[int, int], ...]
    tells: str


def read_sizes(seen: Iterable[Seen], row_bytes: int) -> list[MessageSizes]:
    """Returns the sizes and what they reveal, for each exchange and direction.

    ``row_bytes``: the bytes of one row on the wire. An observer knows them from the recipe, or as
    the greatest common divisor of the sizes.
    """
    groups: dict[tuple[str, str, str, str], list[Seen]] = {}
    for message in seen:
        groups.setdefault(
            (message.phase, message.exchange, message.sender, message.receiver), []
        ).append(message)
    lines = []
    for key, messages in groups.items():
        sizes = Counter(message.payload_bytes for message in messages)
        rounds = len({message.round for message in messages})
        rows = sum(message.payload_bytes for message in messages) // row_bytes
        each_round = (
            f"{rows // rounds:,} rows per round"
            if rows % rounds == 0
            else f"{rows:,} rows in total"
        )
        largest = max(sizes) // row_bytes
        tells = (
            f"{each_round}, in batches of {largest:,}; {rounds} round{'s' if rounds > 1 else ''}"
        )
        lines.append(MessageSizes(*key, rounds, tuple(sorted(sizes.items(), reverse=True)), tells))
    return lines
