"""Declares the exchanges of split training: embeddings and gradients of each batch, and embeddings
for validation. The exchange of early stopping is in ``training``. Two defences change what
embeddings disclose.

MID: the encoder of a passive party draws embeddings at random (``vfl_party.models.layers``).

Distance correlation in the loss, so that embeddings disclose less about columns (NoPeek) or labels.
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
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.bundle import Kind
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import get_real_dtype
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.models import StochasticEncoder
from vfl_party.outbound.declared import Exchange, Sent, f32, noise
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.scoring import scoring


def make_stochastic_encoder(settings: SplitNNSettings, make: MakeEncoder) -> nn.Module | None:
    """Makes a passive party's encoder if the phase has ``mid``, else returns None; see
    ``Method.encoder``.
    """
    if not settings.mid or make.party == make.recipe.active.name:
        return None
    return StochasticEncoder(make("encoder", width=2 * make.width), make.width, settings.mid)


def describe_protection(settings: SplitNNSettings) -> str:
    """Returns a text about how embeddings are protected; see ``MethodFacts.protects``."""
    return f"drawn by MID, λ = {settings.mid:g}" if settings.mid else ""


def check_encoder(party: Party, phase: str, settings: SplitNNSettings) -> None:
    """Raises InputError if the encoder of a passive party does not match the setting ``mid``."""
    encoder = party.models.get("encoder")
    if encoder is None:
        return
    weight = encoder.weight if isinstance(encoder, StochasticEncoder) else 0.0
    if weight == settings.mid or party.role == "active":
        return
    raise InputError(
        Code.CONFIG_INVALID,
        f"recipe: phases: {phase}: mid = {settings.mid:g}: all phases share one encoder, but the "
        f"encoder of {party.name} {f'has mid = {weight:g}' if weight else 'is not stochastic'}. "
        "Set the same mid in all splitnn phases, also in the run to start from, or remove mid.",
    )


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
