"""The exchanges of MocoSFL: latents of both views up, the gradient of one down, and the bottoms to
the server.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vfl_common.bundle import Kind
from vfl_common.stages import Draw
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, f32


def latents(settings: MocoSFLSettings) -> Exchange:
    """Declares the latents q (online bottom) and k (momentum bottom) of two views up, and the
    gradient of q down.
    """
    shape = ("rows", "channels", "height", "width")
    up = Sent(Kind.EMBEDDING, {"q": f32(*shape), "k": f32(*shape)})
    # The gradient belongs to the rows of the party that sent q.
    down = Sent(Kind.GRADIENT, {"dq": f32(*shape)}, label_free=True, rows_of="receiver")
    return Exchange("latents", up, NOTHING if settings.frozen else down)


def handout(bottom: nn.Module) -> Exchange:
    """Declares the bottom model that the active party sends to all at the beginning."""
    sent = Sent(
        Kind.WEIGHTS,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bottom.state_dict().items()},
        label_free=True,
    )
    return Exchange("handout", NOTHING, sent, when="once")


def bottoms(shared: Mapping[str, Tensor], draw: Draw | None) -> Exchange:
    """Declares the bottom models of the drawn passive parties up, and their mean down to the
    parties that are drawn next. ``shared``: {name: tensor}.
    """
    sent = Sent(
        Kind.WEIGHTS, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.items()}
    )
    return Exchange(
        "bottoms", sent, sent, asks="server", passive=True, draw=draw, when="every round"
    )
