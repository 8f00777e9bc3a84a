"""Notes in the report of a run: possible label inference and feature reconstruction, and
encryption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vfl_common.summary import ARROW, ExchangeSummary, Summary, label_statement

# Number of filters of a chain without transforms at the active party: its policy, and the codec.
_SENT, _CAME = 2, 1
_WHERE = "in our rehearsals on a public data set, not on yours"


def protection_notes(summary: Summary) -> Iterator[str]:
    """Yields notes on gradients of the loss, without a defence or with noise, and on embeddings of
    passive parties that leave without a defence.

    Noise on gradients gets a note too, because attacks that average over all epochs remove it.
    There is no note on gradients if the labels are numbers: the attacks infer classes.
    """
    active = {party.name for party in summary.parties if party.role == "active"}
    classes = any("accuracy" in named for named in summary.metrics.values())
    sent = [
        exchange
        for exchange in summary.exchanges
        if exchange.sender in active and exchange.sent.startswith("gradient dz ")
    ]
    came = [
        exchange
        for exchange in summary.exchanges
        if exchange.receiver in active and exchange.sent.startswith("embedding z ")
    ]
    gradients, embeddings = _plain(sent, _SENT), _plain(came, _CAME)
    noisy = _join_phases(exchange for exchange in sent if _filters(exchange) > _SENT)
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


def encryption(summary: Summary) -> str:
    """Returns how the phases that can encrypt gradients have sent them; '' without such a phase."""
    sentences = [
        f"Gradients of {exchange.phase} left {exchange.how}."
        for exchange in summary.exchanges
        if "encrypted" in exchange.how
    ]
    return " ".join(dict.fromkeys(sentences))


def about_exchanges(summary: Summary) -> list[str]:
    """Returns sentences about the labels and encrypted gradients in the messages of a run."""
    return [*filter(None, (label_statement(summary.exchanges), encryption(summary)))]


def _plain(exchanges: Iterable[ExchangeSummary], filters: int) -> str:
    """Returns the phases of the exchanges that neither a method nor more than ``filters`` filters
    protect.
    """
    few = [exchange for exchange in exchanges if _filters(exchange) <= filters]
    return _join_phases(exchange for exchange in few if not exchange.how.startswith("drawn"))


def _filters(exchange: ExchangeSummary) -> int:
    return len(exchange.chain.split(ARROW))


def _join_phases(exchanges: Iterable[ExchangeSummary]) -> str:
    return ", ".join(dict.fromkeys(exchange.phase for exchange in exchanges))
