"""The exchanges of split training: embeddings and gradients of each batch, embeddings for
validation. The verdicts of early stopping are in ``stopping``.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.splitnn.mid import describe_protection
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.outbound.declared import Exchange, Sent, f32, noise
from vfl_party.phases.scoring import scoring

# What a defence of the gradients may know of their rows: the targets.
LABELS = "labels"


def embedding(settings: SplitNNSettings) -> Exchange:
    """Declares a batch's embeddings up, and the gradients of the loss with respect to them down."""
    learnt = f"learnt with NoPeek, λ = {settings.nopeek:g}" if settings.nopeek else ""
    how = "; ".join(text for text in (describe_protection(settings), learnt) if text)
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, how=how)
    through = noise("iso", amplifier=settings.iso)
    how = f"with that of dCor(z, y), λ = {settings.dcor:g}" if settings.dcor else ""
    down = Sent(
        Kind.GRADIENT, {"dz": f32("rows", "width")}, through, beside=frozenset({LABELS}), how=how
    )
    return Exchange("embedding", up, down)


def validation(settings: SplitNNSettings) -> Exchange:
    """Declares the embeddings of validation rows."""
    return scoring(name="validation", how=describe_protection(settings))
