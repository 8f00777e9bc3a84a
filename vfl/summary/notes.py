"""Writes privacy notes for the report of a run: possible label inference and feature
reconstruction, and encryption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vfl_common.summary import ARROW, ExchangeSummary, Summary, describe_label_exposure

# The number of filters of an undefended exchange. Sent by the active party: policy and codec.
# Received by the active party: only the codec.
_SENT_FILTERS, _RECEIVED_FILTERS = 2, 1
_WHERE = "in our rehearsals on a public data set, not on yours"


def yield_protection_notes(summary: Summary) -> Iterator[str]:
    """Yields a note for each kind of tensor that an attack can exploit: gradients without a
    defence, gradients with noise, and embeddings without a defence.

    Noise on gradients gets a note because attacks that average over all epochs can remove it.
    A regression has no note on gradients, because the label inference attacks infer classes.
    """
    active = {party.name for party in summary.parties if party.role == "active"}
    classes = any("accuracy" in named for named in summary.metrics.values())
    sent = [
        exchange
        for exchange in summary.exchanges
        if exchange.sender in active and exchange.sent.startswith("gradient dz ")
    ]
    received = [
        exchange
        for exchange in summary.exchanges
        if exchange.receiver in active and exchange.sent.startswith("embedding z ")
    ]
    gradients = _list_undefended(sent, _SENT_FILTERS)
    embeddings = _list_undefended(received, _RECEIVED_FILTERS)
    noisy = _join_phases(exchange for exchange in sent if _count_filters(exchange) > _SENT_FILTERS)
    if classes and gradients:
        yield (
            f"Gradients of {gradients} leave without a defence: a passive party can infer the "
            f"labels from them (AUC 1.00 by direction {_WHERE}). Try vfl leaks."
        )
    if classes and noisy:
        yield (
            f"Gradients of {noisy} leave with noise: attacks that average over all epochs can "
            f"remove it (AUC 1.00 with Marvell noise {_WHERE}). Try vfl leaks."
        )
    if embeddings:
        yield (
            f"Embeddings of {embeddings} leave without a defence: the active party can reconstruct "
            f"the passive parties' columns from them (mean R² 0.80 {_WHERE}). Try vfl leaks; add a "
            "defence."
        )


def describe_encryption(summary: Summary) -> str:
    """Returns a sentence on encryption for each phase that can encrypt gradients."""
    sentences = [
        f"Gradients of {exchange.phase} left {exchange.how}."
        for exchange in summary.exchanges
        if "encrypted" in exchange.how
    ]
    return " ".join(dict.fromkeys(sentences))


def describe_exchanges(summary: Summary) -> list[str]:
    """Returns sentences about the labels and encrypted gradients in the messages of a run."""
    return [
        *filter(None, (describe_label_exposure(summary.exchanges), describe_encryption(summary)))
    ]


def _list_undefended(exchanges: Iterable[ExchangeSummary], filters: int) -> str:
    """Returns the names of the phases whose exchanges have no defence: at most ``filters`` filters,
    and no values drawn at random by the method.
    """
    return _join_phases(
        exchange
        for exchange in exchanges
        if _count_filters(exchange) <= filters and not exchange.how.startswith("drawn")
    )


def _count_filters(exchange: ExchangeSummary) -> int:
    return len(exchange.chain.split(ARROW))


def _join_phases(exchanges: Iterable[ExchangeSummary]) -> str:
    return ", ".join(dict.fromkeys(exchange.phase for exchange in exchanges))
