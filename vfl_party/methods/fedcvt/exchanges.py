"""Declares FedCVT's exchanges: representations and gradients in each step, and embeddings for
validation.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.outbound.declared import Exchange, Sent, f32, noise
from vfl_party.phases.scoring import scoring

VALIDATION = scoring(name="validation")


def declare_representations(settings: FedCVTSettings) -> Exchange:
    """Declares the exchange of a step: the passive party sends representations, and the active
    party returns the gradients of the loss.

    The tensor ``aligned`` is for the step's aligned rows, labelled rows first. The tensor ``own``
    is for rows that only the passive party has, if such rows are used.
    """
    up, down = {"aligned": f32("rows", "width")}, {"d_aligned": f32("rows", "width")}
    if settings.get_own_batch_size("passive"):
        up["own"], down["d_own"] = f32("own", "width"), f32("own", "width")
    return Exchange(
        "representations",
        Sent(Kind.EMBEDDING, up),
        Sent(Kind.GRADIENT, down, noise("iso", amplifier=settings.iso)),
    )
