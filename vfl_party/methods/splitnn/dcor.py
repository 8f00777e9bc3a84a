"""Adds distance correlation to the loss, so that embeddings disclose less about columns (NoPeek) or
labels.

For a batch of B rows, a_ij is the distance between the embeddings of rows i and j, and b_ij is the
distance between their columns or labels. Both are centred: A_ij = a_ij − (mean of row i) − (mean of
column j) + (mean of all). With V²(z, x) = Σ A_ij B_ij / B², the distance correlation is dCor(z, x)
= V(z, x) / √(V(z, z) V(x, x)), from 0 to 1. It is larger in small batches (Székely et al. 2007).

- Columns: a passive party adds λ · log dCor(z, x) to its own loss (NoPeek, Vepakomma et al., ICDMW
  2020). This does not change the exchanges.
- Labels: the active party adds λ · log dCor(z, y) to the loss whose gradient it sends, for each
  party's embeddings by themselves (Sun et al. 2022, arXiv 2203.01451, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from vfl_party.base.devices import get_real_dtype

# Values of V² below this count as 0.
_TINY = 1e-12


def encode_columns(inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns an encoder's inputs as numbers [B, F], with categories as one-hot vectors."""
    parts = [
        tensor if tensor.is_floating_point() else functional.one_hot(tensor) for tensor in inputs
    ]
    return torch.cat([tensor.flatten(1).to(get_real_dtype()) for tensor in parts], dim=1)


def encode_labels(y_B: Tensor) -> Tensor:
    """Returns targets as numbers [B, C]: classes as one-hot vectors, other targets unchanged."""
    return (
        y_B.to(get_real_dtype()).view(len(y_B), -1)
        if y_B.is_floating_point()
        else functional.one_hot(y_B).to(get_real_dtype())
    )


def log_dcor(z_BD: Tensor, x_BF: Tensor) -> Tensor:
    """Returns log dCor(z, x), a scalar with a graph to z. It is 0 if the two sets of distances are
    proportional, otherwise negative.

    The result is a constant 0 if z and x are independent, or if all rows have the same embedding or
    the same x (one class).
    """
    a_BB, b_BB = _centre_distances(z_BD), _centre_distances(x_BF)
    squares = torch.stack(
        [(left * right).mean() for left, right in ((a_BB, b_BB), (a_BB, a_BB), (b_BB, b_BB))]
    )
    log_cross, log_z, log_x = squares.clamp_min(_TINY).log()
    value = 0.5 * (log_cross - 0.5 * (log_z + log_x))
    return torch.where(squares.min() > _TINY, value, torch.zeros_like(value))


def log_dcor_gradient(z_BD: Tensor, x_BF: Tensor, weight: float) -> Tensor:
    """Returns the gradient [B, D] of ``weight`` · log dCor(z, x) with respect to z."""
    leaf_BD = z_BD.detach().requires_grad_()
    (gradient_BD,) = torch.autograd.grad(
        weight * log_dcor(leaf_BD.to(get_real_dtype()), x_BF), leaf_BD
    )
    return gradient_BD


def add_label_gradients(
    dz_BD: Mapping[str, Tensor], z_BD: Mapping[str, Tensor], y_B: Tensor, weight: float
) -> dict[str, Tensor]:
    """Returns {party: the sum of its gradient [B, D] and the gradient of ``weight`` · log dCor(z,
    y)}.
    """
    labels_BC = encode_labels(y_B)
    return {
        name: dz + log_dcor_gradient(z_BD[name], labels_BC, weight) for name, dz in dz_BD.items()
    }


def _centre_distances(rows: Tensor) -> Tensor:
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return (
        distances
        - distances.mean(dim=0, keepdim=True)
        - distances.mean(dim=1, keepdim=True)
        + distances.mean()
    )
