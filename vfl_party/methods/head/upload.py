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
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, Traffic, f32, noise, u8
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
    down = (
        NOTHING if settings.deadline_s is None else Sent(Kind.ACK, {"used": u8(1)}, label_free=True)
    )
    return Exchange("upload", up, down, when="once")


def traffic(party: Party, name: str, settings: HeadSettings) -> Traffic:
    """See ``Method.traffic``."""
    once, step = upload(settings, party.course.protected), StepKey(name, UPLOAD, 0)
    return Traffic(
        party.joint_occurrences(once, step, party.joint_rows("train")), bound=party.bound
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
    for name in late:
        at = sum(recipe.embedding_size(each) for each in order[: order.index(name)])
        first.weight[:, at : at + recipe.embedding_size(name)] = 0.0


def zeros(late: Sequence[str], n: int, party: Party) -> dict[str, Tensor]:
    """Returns {late party: zeros [n, D]} on the device of ``party``."""
    widths = party.widths
    return {name: torch.zeros(n, widths[name], device=party.device) for name in late}
