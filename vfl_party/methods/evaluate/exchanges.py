"""What an evaluation exchanges."""

from __future__ import annotations

from dataclasses import replace

from vfl_common.bundle import StepKey
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases import stand_in
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import chunks, scoring, scoring_traffic


def embeddings(party: Party, settings: EvaluateSettings) -> Exchange:
    """Declares the exchange of the rows of each split, with the noise of the phases before, and of
    the mean that stands in for a party.
    """
    course = party.course
    made = scoring(course.sent_noise, name="embedding", when="once", how=course.protected)
    if settings.subsets and settings.absent == "mean":
        made = replace(made, when=f"{made.when}; then the mean of the training rows, as one row")
    return made


def steps(party: Party, settings: EvaluateSettings) -> int:
    """Returns how many steps the rows of all splits take."""
    return sum(len(chunks(party.rows(split))) for split in settings.splits)


def traffic(party: Party, phase: str, settings: EvaluateSettings) -> Traffic:
    """See ``Method.traffic``."""
    found: list[Occurrence] = []
    exchange, batch = embeddings(party, settings), 0
    for split in settings.splits:
        rows = party.rows(split)
        found += scoring_traffic(party, phase, exchange, 0, batch, rows)
        batch += len(chunks(rows))
    if settings.subsets:
        found += stand_in.traffic(party, exchange, settings.absent, StepKey(phase, 0, batch))
    return Traffic(found)
