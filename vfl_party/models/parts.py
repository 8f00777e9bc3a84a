"""The top of an encoder: the layers that FedHSSL aggregates across parties.

The other layers stay at their party.
"""

from __future__ import annotations

from torch import Tensor, nn

from vfl_common.errors import Code, InputError

_ATTRIBUTE = "top_layers"


def mark_top(encoder: nn.Module, *layers: str) -> nn.Module:
    """Marks the submodules ``layers`` as the top of an encoder, and returns the encoder.

    A user's encoder sets the attribute ``top_layers`` itself.
    """
    # The names are neither tensors nor modules, so this bypasses nn.Module.__setattr__.
    encoder.__dict__[_ATTRIBUTE] = layers
    return encoder


def top_state(encoder: nn.Module) -> dict[str, Tensor]:
    """Returns {name in the encoder: tensor} for the parameters and buffers of the encoder's top.

    The tensors are not copied. Integer buffers such as BatchNorm's ``num_batches_tracked`` are left
    out. Raises InputError (MODEL_INVALID) if the encoder does not name the layers of its top.
    """
    layers = getattr(encoder, _ATTRIBUTE, ())
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    submodules = {name for name, _ in encoder.named_modules()}
    for layer in layers:
        if layer not in submodules:
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
