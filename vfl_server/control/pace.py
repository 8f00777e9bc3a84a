"""Whose progress is the run's: a pure function of what the parties have told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vfl_common.pb.vfl.v1 import control_pb2


def pace(told: Mapping[str, control_pb2.Progress], phases: Sequence[str], active: str, teller: str) -> str | None:
    """The party that is furthest behind among those at work; where nobody is, the one that has just told of its end.

    A party that has done all rounds of the phase that it told of last is not at work; nor, for the run, is one that
    tells of a phase which the active party has behind it: its peers go on without it. An active party that is idle, as
    in FedOnce's local phase, tells nothing, and the others set the pace.

    Args:
        told: {party: its last progress in this generation}.
        phases: of the recipe, in order.
        active: the active party.
        teller: who has told last.

    None where the teller is no longer of account.
    """
    place = {name: phases.index(each.phase) for name, each in told.items() if each.phase in phases}
    front = place.get(active, 0)
    behind = {
        name: (place[name], _rounds(told[name]))
        for name in place
        if place[name] >= front and not (told[name].rounds and told[name].round >= told[name].rounds)
    }
    if behind:
        return min(behind, key=lambda name: behind[name])
    return teller if teller == active or place.get(teller, -1) >= front else None


def _rounds(progress: control_pb2.Progress) -> float:
    """Rounds that are done, with the fraction of the one under way."""
    return progress.round + (progress.batch / progress.batches if progress.batches else 0.0)
