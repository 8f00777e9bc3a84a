"""The notes of a run's report about gradients: from which labels can be read, and how others are encrypted."""

from __future__ import annotations

from vfl_common.summary import Summary

_PLAIN = 2  # filters of a chain without transforms: the policy, the codec


def unprotected(summary: Summary) -> str:
    """Words that a phase sends gradients of the labels' loss as they are; '' if none does, or labels are numbers."""
    if not any("accuracy" in named for named in summary.metrics.values()):
        return ""
    active = {party.name for party in summary.parties if party.role == "active"}
    phases = [
        each.phase
        for each in summary.exchanges
        if each.sender in active and each.sent.startswith("gradient dz ") and len(each.chain.split(" -> ")) <= _PLAIN
    ]
    if not phases:
        return ""
    read = "a passive party can read the labels from them (AUC 1.00 by direction, in rehearsals on credit default)"
    return f"Gradients of {', '.join(dict.fromkeys(phases))} leave as they are: {read}. Try vfl leaks; add a defence."


def encryption(summary: Summary) -> str:
    """Says how the phases that encrypt their gradients have done so, or that they have not; '' if there is none."""
    found = [
        f"Gradients of {each.phase} left {each.when}."
        for each in summary.exchanges
        if each.exchange == "gradients" and "encrypted" in each.when
    ]
    return " ".join(dict.fromkeys(found))
