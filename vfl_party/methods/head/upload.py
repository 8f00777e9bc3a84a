"""What is sent once: a party's representations up, and an acknowledgement down once they are in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl_common.bundle import BundleSpec, Kind
from vfl_common.config.recipe import Recipe
from vfl_party.exchange import NOTHING, expect
from vfl_party.methods.head.settings import HeadSettings


def answer(settings: HeadSettings) -> BundleSpec:
    """The acknowledgement; with a deadline it says whether the representations are used."""
    return NOTHING if settings.deadline_s is None else expect(Kind.ACK, used=(torch.uint8, (1,)))


@torch.no_grad()
def without(top: nn.Module, recipe: Recipe, late: Sequence[str]) -> None:
    """Makes zero the weights by which a top model on concatenated representations sees those of the ``late``."""
    if not late:
        return
    first = next(module for module in top.modules() if isinstance(module, nn.Linear))
    order = [*([recipe.active.name] if recipe.active.features else []), *(party.name for party in recipe.passives)]
    d = recipe.model.embedding_size
    for name in late:
        at = d * order.index(name)
        first.weight[:, at : at + d] = 0.0


def zeros(late: Sequence[str], n: int, d: int, device: torch.device) -> dict[str, Tensor]:
    """{late party: [n, d]}"""
    return {name: torch.zeros(n, d, device=device) for name in late}
