"""NoPeek: a passive party's own loss keeps its embeddings from telling its columns (Vepakomma et al., ICDMW 2020).

For a batch of B rows, a_ij is the distance of the embeddings of rows i and j, and b_ij that of their columns. Both are
centred: A_ij = a_ij − (mean of row i) − (mean of column j) + (mean of all). With V²(z, x) = Σ A_ij B_ij / B², the
distance correlation is dCor(z, x) = V(z, x) / √(V(z, z) V(x, x)), from 0 to 1; it is larger in small batches (Székely
et al. 2007). The party adds λ · log dCor(z, x) to the loss whose gradient the active party sends. Nothing else crosses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_TINY = 1e-12  # below this V² counts as 0, and the term has no gradient: all rows have one embedding


def columns_of(inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns an encoder's inputs as numbers [B, F]; a category is as many numbers as its column has at most."""
    hot = [each if each.is_floating_point() else functional.one_hot(each) for each in inputs]
    return torch.cat([each.flatten(1).float() for each in hot], dim=1)


def log_dcor(z_BD: Tensor, x_BF: Tensor) -> Tensor:
    """Returns log dCor(z, x), a scalar with a graph to z: 0 if distances are alike but for their scale, else below."""
    a_BB, b_BB = _centred(z_BD), _centred(x_BF)
    pairs = ((a_BB, b_BB), (a_BB, a_BB), (b_BB, b_BB))
    both, of_z, of_x = ((one * other).mean().clamp_min(_TINY) for one, other in pairs)
    return 0.5 * (both.log() - 0.5 * (of_z.log() + of_x.log()))


def own_gradient(z_BD: Tensor, inputs: tuple[Tensor, ...], weight: float) -> Tensor:
    """Returns the gradient [B, D] of ``weight`` · log dCor(z, x) with respect to z."""
    leaf_BD = z_BD.detach().requires_grad_()
    (found,) = torch.autograd.grad(weight * log_dcor(leaf_BD.float(), columns_of(inputs)), leaf_BD)
    return found


def _centred(rows: Tensor) -> Tensor:
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return distances - distances.mean(dim=0, keepdim=True) - distances.mean(dim=1, keepdim=True) + distances.mean()
