"""Declares the exchanges of split training: embeddings and gradients of each batch, and embeddings
for validation. The exchange of early stopping is in ``stopping``.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.splitnn.mid import describe_protection
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.outbound.declared import Exchange, Sent, f32, noise
from vfl_party.phases.scoring import scoring

# The name of the targets, which the active party passes to its transforms of gradients and does not
# send.
LABELS = "labels"


def embedding(settings: SplitNNSettings) -> Exchange:
    """Declares the exchange of a batch: each passive party sends embeddings, and the active party
    returns the gradients of the loss with respect to these.
    """
    nopeek_text = f"learnt with NoPeek, λ = {settings.nopeek:g}" if settings.nopeek else ""
    how = "; ".join(text for text in (describe_protection(settings), nopeek_text) if text)
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, how=how)
    through = noise("iso", amplifier=settings.iso)
    how = f"with that of dCor(z, y), λ = {settings.dcor:g}" if settings.dcor else ""
    down = Sent(
        Kind.GRADIENT, {"dz": f32("rows", "width")}, through, beside=frozenset({LABELS}), how=how
    )
    return Exchange("embedding", up, down)


def validation(settings: SplitNNSettings) -> Exchange:
    """Declares the exchange of embeddings of validation rows."""
    return scoring(name="validation", how=describe_protection(settings))
