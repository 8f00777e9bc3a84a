"""Makes ``data/ssl_reference.json``: what lightly computes for the inputs of ``test_ssl_losses``.

lightly is no dependency. It was asked once (1.6.0, torch 2.15), outside of the project's
environment:

    pip install --target /tmp/lightly --no-deps lightly==1.6.0 lightly_utils aenum
    PYTHONPATH=/tmp/lightly python -m tests.unit.party.methods.ssl_reference

Where it can be imported, the tests compare with it live too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).parent / "data" / "ssl_reference.json"
SHAPES = [(2, 3), (8, 16), (64, 128), (100, 10)]
TEMPERATURES = [0.07, 0.2, 0.5, 1.0]


def inputs(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, z and a queue of twice as many rows, of unit length; p and z with gradient and related, as
    two views are.

    float64, so that 1e-6 is a bound on formulas and not on rounding.
    """
    random = torch.Generator().manual_seed(1000 * rows + width)
    p_BD = torch.randn(rows, width, generator=random, dtype=torch.float64)
    z_BD = 0.5 * p_BD + torch.randn(rows, width, generator=random, dtype=torch.float64)
    queue_QD = torch.nn.functional.normalize(
        torch.randn(2 * rows, width, generator=random, dtype=torch.float64), dim=1
    )
    return p_BD.requires_grad_(), z_BD.requires_grad_(), queue_QD


def measured(loss: Tensor, *sources: Tensor) -> list[float]:
    """The loss, then the norm of its gradient at each source."""
    return [loss.item(), *(grad.norm().item() for grad in torch.autograd.grad(loss, sources))]


def by_lightly() -> dict[str, list[float]]:
    """[loss, norms of gradients …] by "name rows width [temperature]"."""
    from lightly.loss import NegativeCosineSimilarity, NTXentLoss  # type: ignore[import-not-found]

    found: dict[str, list[float]] = {}
    for rows, width in SHAPES:
        p_BD, z_BD, queue_QD = inputs(rows, width)
        cosine = NegativeCosineSimilarity()
        found[f"simsiam {rows} {width}"] = measured(cosine(p_BD, z_BD.detach()), p_BD)
        found[f"byol {rows} {width}"] = measured(2 + 2 * cosine(p_BD, z_BD.detach()), p_BD)
        for temperature in TEMPERATURES:
            simclr: Any = NTXentLoss(temperature=temperature)
            found[f"nt_xent {rows} {width} {temperature}"] = measured(
                simclr(p_BD, z_BD), p_BD, z_BD
            )
            moco: Any = NTXentLoss(
                temperature=temperature, memory_bank_size=(len(queue_QD), width)
            ).double()
            moco.memory_bank.bank.copy_(queue_QD)
            found[f"moco {rows} {width} {temperature}"] = measured(moco(p_BD, z_BD.detach()), p_BD)
    return found


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(by_lightly(), indent=1) + "\n")
