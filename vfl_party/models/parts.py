"""An encoder's top: the layers that FedHSSL shares between parties, while the layers below stay with their party."""

from __future__ import annotations

from torch import Tensor, nn

from vfl_common.errors import Code, InputError

_ATTRIBUTE = "top_layers"


def mark_top(encoder: nn.Module, *layers: str) -> nn.Module:
    """Notes which submodules, by their names, are the top. An encoder of the user's own sets ``top_layers`` itself."""
    encoder.__dict__[_ATTRIBUTE] = layers  # not a tensor: past nn.Module's own bookkeeping
    return encoder


def top_state(encoder: nn.Module) -> dict[str, Tensor]:
    """{name in the encoder: parameter or floating-point buffer} of its top: the tensors themselves, not copies.

    Counters (BatchNorm's ``num_batches_tracked``) are left out. Raises InputError (MODEL_INVALID) where the encoder
    names no top.
    """
    layers = getattr(encoder, _ATTRIBUTE, ())
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    known = {name for name, _ in encoder.named_modules()}
    for layer in layers:
        if layer not in known:
            text = f"the encoder's top_layers names {layer!r}, and it has no submodule of that name"
            raise InputError(Code.MODEL_INVALID, f"{text}; correct it")
    found = {
        name: tensor
        for name, tensor in encoder.state_dict(keep_vars=True).items()
        if name.startswith(tuple(f"{layer}." for layer in layers)) and tensor.is_floating_point()
    }
    if not found:
        text = "the encoder names no top layers to aggregate: give it an attribute top_layers, names of its submodules"
        raise InputError(Code.MODEL_INVALID, f"{text}, or set aggregate = false")
    return found
