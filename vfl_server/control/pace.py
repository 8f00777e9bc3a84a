"""Decides whose progress is shown as the run's: a pure function of the parties' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vfl_common.pb.vfl.v1 import control_pb2


def pace(
    told: Mapping[str, control_pb2.Progress], phases: Sequence[str], active: str, teller: str
) -> str | None:
    """Returns the slowest working party; if none is working, the one that just reported that it
    finished.

    A party is not working if it has finished the phase of its last report, or if the active party
    is in a later phase: the run continues without it. An idle active party, as in FedOnce's local
    phase, reports nothing; then the others decide.

    Args:
        told: {party: its last progress in this generation}.
        phases: the recipe's phases, in order.
        active: the active party.
        teller: the party that reported last.

    Returns None if the reporting party no longer affects the run's progress.
    """
    place = {name: phases.index(each.phase) for name, each in told.items() if each.phase in phases}
    front = place.get(active, 0)
    behind = {
        name: (place[name], _rounds(told[name]))
        for name in place
        if place[name] >= front
        and not (told[name].rounds and told[name].round >= told[name].rounds)
    }
    if behind:
        return min(behind, key=lambda name: behind[name])
    return teller if teller == active or place.get(teller, -1) >= front else None


def _rounds(progress: control_pb2.Progress) -> float:
    """Returns the finished rounds, with the fraction of the current one."""
    return progress.round + (progress.batch / progress.batches if progress.batches else 0.0)
