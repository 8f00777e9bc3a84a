"""Declares the exchanges of a FedHSSL round: projections of the aligned rows, and the tops of the
local encoders.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vfl_common.bundle import Kind
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.outbound.declared import Exchange, Sent, f32, noise


def declare_projection(settings: FedHSSLSettings) -> Exchange:
    """Declares the exchange of projections. Each passive party sends its projections up. The active
    party sends its projections down, the same to all. No gradients are sent.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")})
    down = Sent(
        Kind.EMBEDDING,
        {"z": f32("rows", "width")},
        noise("iso", amplifier=settings.iso_embedding),
        label_free=True,
    )
    return Exchange("projection", up, down)


def declare_weights(settings: FedHSSLSettings, shared: Mapping[str, Tensor]) -> Exchange:
    """Declares the exchange of weights. Each party sends the weights of its top encoder, projector
    and predictor up. The server sends their mean down.

    ``shared``: {name: tensor} of these weights. The active party adds noise to parameters, but
    sends BatchNorm's statistics unchanged.
    """
    tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.items()}
    statistics = [
        name for name, tensor in shared.items() if not isinstance(tensor, torch.nn.Parameter)
    ]
    transforms = noise("iso", role="active", leave=statistics, amplifier=settings.iso_weights)
    up, down = Sent(Kind.WEIGHTS, tensors, transforms, label_free=True), Sent(Kind.WEIGHTS, tensors)
    return Exchange("weights", up, down, asks="server", when="every round")
