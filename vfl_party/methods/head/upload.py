"""The single upload: a party's representations up; once they are in a checkpoint, an
acknowledgement down.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_party.methods.head.settings import UPLOAD, HeadSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, Traffic, f32, noise, u8
from vfl_party.phases.context import Party


def upload(settings: HeadSettings, how: str) -> Exchange:
    """Declares a party's representations of all training rows up; with a deadline the answer says
    if they are used.

    ``how``: see ``Sent``.
    """
    up = Sent(
        Kind.EMBEDDING,
        {"z": f32("rows", "width")},
        noise("gaussian", sigma=settings.noise),
        how=how,
    )
    down = NOTHING if settings.deadline_s is None else Sent(Kind.ACK, {"used": u8(1)})
    return Exchange("upload", up, down, when="once")


def traffic(party: Party, name: str, settings: HeadSettings) -> Traffic:
    """See ``Method.traffic``."""
    sizes = {"rows": len(party.rows("train")), "width": party.embedding_size}
    return Traffic(
        [Occurrence.of(upload(settings, party.course.protected), StepKey(name, UPLOAD, 0), **sizes)]
    )


@torch.no_grad()
def without(top: nn.Module, recipe: Recipe, late: Sequence[str]) -> None:
    """Zeroes the weights by which a top model on concatenated representations reads those of the
    ``late``.
    """
    if not late:
        return
    first = next(module for module in top.modules() if isinstance(module, nn.Linear))
    order = [
        *([recipe.active.name] if recipe.active.features else []),
        *(party.name for party in recipe.passives),
    ]
    d = recipe.model.embedding_size
    for name in late:
        at = d * order.index(name)
        first.weight[:, at : at + d] = 0.0


def zeros(late: Sequence[str], n: int, d: int, device: torch.device) -> dict[str, Tensor]:
    """Returns {late party: zeros [n, d]}."""
    return {name: torch.zeros(n, d, device=device) for name in late}
