"""The notes of a run's report: what labels and columns can be read from, and how gradients are
encrypted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vfl_common.summary import ARROW, ExchangeSummary, Summary, label_statement

# Filters of a chain without transforms, as the active party has it: its policy, and the codec.
_SENT, _CAME = 2, 1
_WHERE = "in our rehearsals on a public data set, not on yours"
_PLAINLY = "leave without a defence"
_ADVICE = "Try vfl leaks; add a defence."


def unprotected(summary: Summary) -> Iterator[str]:
    """Yields a note on gradients of the labels' loss, without and with noise, and one on embeddings
    of passive parties that leave without a defence.

    Noise on gradients gets a note too, because attacks add up all epochs and read through it.
    Nothing is said of gradients if labels are numbers: the attacks find classes.
    """
    active = {party.name for party in summary.parties if party.role == "active"}
    classes = any("accuracy" in named for named in summary.metrics.values())
    sent = [
        each
        for each in summary.exchanges
        if each.sender in active and each.sent.startswith("gradient dz ")
    ]
    came = [
        each
        for each in summary.exchanges
        if each.receiver in active and each.sent.startswith("embedding z ")
    ]
    gradients, embeddings = _plain(sent, _SENT), _plain(came, _CAME)
    noisy = _named(each for each in sent if _filters(each) > _SENT)
    if classes and gradients:
        read = f"a passive party can read the labels from them (AUC 1.00 by direction {_WHERE})"
        yield f"Gradients of {gradients} {_PLAINLY}: {read}. Try vfl leaks."
    if classes and noisy:
        read = (
            "attacks that add up all epochs can read through it (AUC 1.00 through Marvell noise "
            f"{_WHERE})"
        )
        yield f"Gradients of {noisy} leave with noise: {read}. Try vfl leaks."
    if embeddings:
        read = (
            "the active party can read the passive parties' columns from them (R² 0.80 in the "
            f"mean {_WHERE})"
        )
        yield f"Embeddings of {embeddings} {_PLAINLY}: {read}. {_ADVICE}"


def encryption(summary: Summary) -> str:
    """Says how the phases that encrypt their gradients have done so, or that they have not; '' if
    there is none.
    """
    found = [
        f"Gradients of {each.phase} left {each.how}."
        for each in summary.exchanges
        if "encrypted" in each.how
    ]
    return " ".join(dict.fromkeys(found))


def about_exchanges(summary: Summary) -> list[str]:
    """Returns sentences about what the messages of a run carry: labels, and encrypted gradients."""
    return [*filter(None, (label_statement(summary.exchanges), encryption(summary)))]


def _plain(exchanges: Iterable[ExchangeSummary], filters: int) -> str:
    """Names the phases of the exchanges that no method protects, and whose chains have no more
    filters than these.
    """
    few = [each for each in exchanges if _filters(each) <= filters]
    return _named(each for each in few if not each.how.startswith("drawn"))


def _filters(exchange: ExchangeSummary) -> int:
    return len(exchange.chain.split(ARROW))


def _named(exchanges: Iterable[ExchangeSummary]) -> str:
    return ", ".join(dict.fromkeys(each.phase for each in exchanges))
