"""The only exchange: embeddings of the common rows, for the outputs of the joint model."""

from __future__ import annotations

from vfl_common.bundle import StepKey
from vfl_party.base.seeds import Rows
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import chunks, scoring, scoring_traffic

# Says that a checkpoint of the active party contains the answers, so passive parties may leave.
KEPT = Exchange("kept", NOTHING, NOTHING, when="once")


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of embeddings, with the noise of the phases before."""
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


def rows_to_ask(party: Party, settings: StudentSettings) -> dict[str, Rows]:
    """Returns {name: rows} of the rows that the joint model scores, in order: the aligned rows, and
    those of the splits if ``together`` is set.
    """
    more = settings.splits if settings.together else ()
    return {"aligned": party.rows("aligned")} | {split: party.rows(split) for split in more}


def get_kept_step(party: Party, phase: str, settings: StudentSettings) -> StepKey:
    """Returns the step of ``KEPT``, the one after the embeddings."""
    steps = sum(len(chunks(rows)) for rows in rows_to_ask(party, settings).values())
    return StepKey(phase, ASK, steps)


def traffic(party: Party, phase: str, settings: StudentSettings) -> Traffic:
    """See ``Method.traffic``."""
    exchange, step, occurrences = embeddings(party), 0, list[Occurrence]()
    for rows in rows_to_ask(party, settings).values():
        occurrences += scoring_traffic(party, phase, exchange, ASK, step, rows)
        step += len(chunks(rows))
    return Traffic([*occurrences, Occurrence.of(KEPT, get_kept_step(party, phase, settings))])
