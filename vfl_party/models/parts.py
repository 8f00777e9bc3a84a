"""An encoder's top: the layers that FedHSSL shares between parties, while the layers below stay
with their party.
"""

from __future__ import annotations

from torch import Tensor, nn

from vfl_common.errors import Code, InputError

_ATTRIBUTE = "top_layers"


def mark_top(encoder: nn.Module, *layers: str) -> nn.Module:
    """Notes the names of the submodules that are the top. A user's own encoder sets ``top_layers``
    itself.
    """
    # It is not a tensor, so nn.Module's bookkeeping is bypassed.
    encoder.__dict__[_ATTRIBUTE] = layers
    return encoder


def top_state(encoder: nn.Module) -> dict[str, Tensor]:
    """Returns {name in the encoder: parameter or floating-point buffer} of its top: the tensors,
    not copies.

    Counters (BatchNorm's ``num_batches_tracked``) are left out. Raises InputError (MODEL_INVALID)
    if the encoder names no top.
    """
    layers = getattr(encoder, _ATTRIBUTE, ())
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    known = {name for name, _ in encoder.named_modules()}
    for layer in layers:
        if layer not in known:
            raise InputError(
                Code.MODEL_INVALID,
                f"top_layers: the encoder has no such submodule (got {layer!r}). Name a submodule "
                "of the encoder.",
            )
    state = {
        name: tensor
        for name, tensor in encoder.state_dict(keep_vars=True).items()
        if name.startswith(tuple(f"{layer}." for layer in layers)) and tensor.is_floating_point()
    }
    if not state:
        raise InputError(
            Code.MODEL_INVALID,
            "top_layers: the encoder names no layers to aggregate. Set the attribute top_layers to "
            "names of submodules, or set aggregate = false.",
        )
    return state
