"""Declares the exchanges: embeddings of the common rows, and the message that they are kept."""

from __future__ import annotations

from vfl_common.bundle import StepKey
from vfl_party.base.seeds import Rows
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring, scoring_traffic, split_into_chunks

# The message that a checkpoint of the active party contains the outputs, so passive parties may
# leave.
KEPT = Exchange("kept", NOTHING, NOTHING, when="once")


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of embeddings, with the noise of the earlier phases."""
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


def get_asked_rows(party: Party, settings: StudentSettings) -> dict[str, Rows]:
    """Returns {name: rows} for the rows that the joint model scores, in order: the aligned rows
    and, if ``together`` is set, the rows of the splits.
    """
    more = settings.splits if settings.together else ()
    return {"aligned": party.rows("aligned")} | {split: party.rows(split) for split in more}


def get_kept_step(party: Party, phase: str, settings: StudentSettings) -> StepKey:
    """Returns the step of ``KEPT``, which is the step after the embeddings."""
    steps = sum(len(split_into_chunks(rows)) for rows in get_asked_rows(party, settings).values())
    return StepKey(phase, ASK, steps)


def traffic(party: Party, phase: str, settings: StudentSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    exchange, step, occurrences = embeddings(party), 0, list[Occurrence]()
    for rows in get_asked_rows(party, settings).values():
        occurrences += scoring_traffic(party, phase, exchange, ASK, step, rows)
        step += len(split_into_chunks(rows))
    return Traffic([*occurrences, Occurrence.of(KEPT, get_kept_step(party, phase, settings))])
