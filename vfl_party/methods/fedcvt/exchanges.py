"""The exchanges of FedCVT: representations and gradients of each step, embeddings for
validation.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.outbound.declared import Exchange, Sent, f32, noise
from vfl_party.phases.scoring import scoring

VALIDATION = scoring(name="validation")


def representations(settings: FedCVTSettings) -> Exchange:
    """Declares the passive party's representations up, and the gradients of the whole loss by them
    down.

    ``aligned``: of the step's aligned rows, those with labels first. ``own``: of rows that the
    active party does not have, if these take part.
    """
    up, down = {"aligned": f32("rows", "width")}, {"d_aligned": f32("rows", "width")}
    if settings.own_batch("passive"):
        up["own"], down["d_own"] = f32("own", "width"), f32("own", "width")
    return Exchange(
        "representations",
        Sent(Kind.EMBEDDING, up),
        Sent(Kind.GRADIENT, down, noise("iso", amplifier=settings.iso)),
    )
