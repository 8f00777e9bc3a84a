"""What anybody on the network learns from the times of messages alone, although all contents are
encrypted.

Times are those of a rehearsal: all parties take turns in one process, so a gap is the work of all.
On several machines parties work at once and networks add their part, so the figures differ; where
the pauses are does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vfl.leak_meter.scene.record import Passed, Way
from vfl.leak_meter.scene.scores import auc, middle_and_high

# Answers at least, to call a party slower.
_FEW = 5
# Times as long, and so much longer, to be called slower.
_CLEAR, _MIN_EXCESS_S = 1.5, 0.001


@dataclass(frozen=True)
class Times:
    """When the messages of one exchange passed in one direction.

    ``gap_s``, ``gap_high_s``: median and 95 % quantile of the seconds between two of them.
    ``tells``: what follows, in words.
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
        """Both gaps, in words."""
        return seconds(self.gap_s), seconds(self.gap_high_s)


def read_times(passed: Iterable[Passed], planned: Mapping[str, int]) -> list[Times]:
    """Returns a line for each exchange and direction with two messages or more. ``planned``:
    {phase: its rounds}.

    That a phase ended early is said in its first line.
    """
    ways: dict[Way, list[Passed]] = {}
    answers: dict[Way, list[float]] = {}
    # {party: when a message came to it last}.
    came_s: dict[str, float] = {}
    for message in passed:
        ways.setdefault(message.way, []).append(message)
        if message.sender in came_s:
            answers.setdefault(message.way, []).append(message.at_s - came_s[message.sender])
        came_s[message.receiver] = message.at_s
    lines, left = list[Times](), dict(planned)
    for way, messages in ways.items():
        if len(messages) > 1:
            gap_s, high_s = middle_and_high(_gaps(messages))
            words = [
                _pauses(messages),
                _early(messages, left.pop(way[0], 0)),
                _slower(way, answers),
            ]
            lines.append(Times(*way, len(messages), gap_s, high_s, "; ".join(filter(None, words))))
    return lines


def _gaps(messages: Sequence[Passed]) -> list[float]:
    return [after.at_s - before.at_s for before, after in pairwise(messages)]


def _pauses(messages: Sequence[Passed]) -> str:
    """Says whether rounds end with a pause: how long it is, and how well the longest gaps tell the
    ends (AUC).
    """
    gaps_N = np.array(_gaps(messages))
    ends_N = np.array([after.round != before.round for before, after in pairwise(messages)])
    if not ends_N.any() or ends_N.all():
        return ""
    usual_s, pause_s = statistics.median(gaps_N[~ends_N]), statistics.median(gaps_N[ends_N])
    if pause_s < _CLEAR * usual_s:
        return "no clear pause where rounds end"
    text = (
        f"a pause of {seconds(pause_s)} where a round ends, {pause_s / max(usual_s, 1e-9):.0f} "
        "x a usual gap"
    )
    return f"{text} (AUC {auc(gaps_N, ends_N):.2f})"


def _early(messages: Sequence[Passed], planned: int) -> str:
    """Says that the phase ended before its last round, which whoever knows the recipe sees."""
    rounds = 1 + max(message.round for message in messages)
    return f"{rounds} of {planned} rounds: it ended early" if rounds < planned else ""


def _slower(way: Way, answers: Mapping[Way, Sequence[float]]) -> str:
    """Says that a sender takes longer for its answers than the others of the same exchange."""
    phase, exchange, sender, receiver = way
    others = [
        statistics.median(taken)
        for (of, name, who, to), taken in answers.items()
        if (of, name, to) == (phase, exchange, receiver) and who != sender
    ]
    if not others or len(answers.get(way, ())) < _FEW:
        return ""
    own = statistics.median(answers[way])
    usual = statistics.median(others)
    if own < _CLEAR * usual or own - usual < _MIN_EXCESS_S:
        return ""
    return f"slower than the others: it answers after {seconds(own)}, they after {seconds(usual)}"


def seconds(value: float) -> str:
    """Words a time with its unit: ``1.2 s``, ``35 ms``."""
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.2g} ms"
