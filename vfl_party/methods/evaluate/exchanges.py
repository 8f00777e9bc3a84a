"""Declares the exchanges of an evaluation and lists them for a run."""

from __future__ import annotations

from dataclasses import replace

from vfl_common.bundle import StepKey
from vfl_party.methods.evaluate import importance
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.methods.evaluate.telling import count_metrics_steps, metrics_traffic
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases import stand_in
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring, scoring_traffic, split_into_chunks


def embeddings(party: Party, settings: EvaluateSettings) -> Exchange:
    """Declares the exchange of embeddings, with the noise of the earlier phases: embeddings of the
    rows of each split, the mean embedding that replaces an absent party, and the embeddings with
    permuted columns.
    """
    course = party.course
    exchange = scoring(course.sent_noise, name="embedding", when="once", how=course.protected)
    later = ""
    if settings.subsets and settings.absent == "mean":
        later = "; then the mean of the training rows, as one row"
    if settings.importance:
        later += "; then the validation rows with each column permuted"
    return replace(exchange, when=exchange.when + later)


def traffic(party: Party, phase: str, settings: EvaluateSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    occurrences: list[Occurrence] = []
    exchange, batch = embeddings(party, settings), 0
    for split in settings.splits:
        rows = party.joint_rows(split)
        occurrences += scoring_traffic(party, phase, exchange, 0, batch, rows)
        batch += len(split_into_chunks(rows))
    occurrences += metrics_traffic(party, StepKey(phase, 0, batch), settings.splits)
    batch += count_metrics_steps(party)
    if settings.subsets:
        means = stand_in.traffic(party, exchange, settings.absent, StepKey(phase, 0, batch))
        occurrences += means
        batch += stand_in.count_steps(settings.absent)
    if not settings.importance:
        return Traffic(occurrences, bound=party.bound)
    permuted, uncounted = importance.traffic(party, exchange, settings, StepKey(phase, 0, batch))
    bound = (
        f"the permuted columns of {', '.join(uncounted)} are not counted, because this party does "
        "not have them"
    )
    return Traffic([*occurrences, *permuted], bound=bound if uncounted else "")
