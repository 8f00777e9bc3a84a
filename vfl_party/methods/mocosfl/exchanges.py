"""Declares MocoSFL's exchanges: the latents of two views and the gradient of one, and the bottom
models that the server averages.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vfl_common.bundle import Kind
from vfl_common.stages import Draw
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, f32


def declare_latents(settings: MocoSFLSettings) -> Exchange:
    """Declares the exchange of latents. A passive party sends the latents of two views: q from the
    bottom model, and k from its moving average. The active party returns the gradient of q.
    """
    shape = ("rows", "channels", "height", "width")
    up = Sent(Kind.EMBEDDING, {"q": f32(*shape), "k": f32(*shape)})
    # The gradient belongs to the rows of the party that sent q.
    down = Sent(Kind.GRADIENT, {"dq": f32(*shape)}, label_free=True, rows_of="receiver")
    return Exchange("latents", up, NOTHING if settings.frozen else down)


def declare_handout(bottom: nn.Module) -> Exchange:
    """Declares the exchange in which the active party sends its bottom model to all passive parties
    at the beginning.
    """
    sent = Sent(
        Kind.WEIGHTS,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bottom.state_dict().items()},
        label_free=True,
    )
    return Exchange("handout", NOTHING, sent, when="once")


def declare_bottoms(shared: Mapping[str, Tensor], draw: Draw | None) -> Exchange:
    """Declares the exchange of bottom models. The drawn passive parties send theirs, and the
    parties that are drawn next get the mean. ``shared``: {name: tensor} of the weights.
    """
    sent = Sent(
        Kind.WEIGHTS, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.items()}
    )
    return Exchange(
        "bottoms", sent, sent, asks="server", passive=True, draw=draw, when="every round"
    )
