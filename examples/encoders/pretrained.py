"""An encoder that begins with weights from a safetensors file.

[encoder]
kind = "custom"
factory = "pretrained:Pretrained"
options = { weights = "/data/net.safetensors", width = 64 }

The file has the tensors 0.weight [H, F] and 0.bias [H] of a linear layer on the party's F columns,
as ``safetensors.torch.save_file(model.state_dict(), path)`` writes them for a
``torch.nn.Sequential``.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vfl_party.models import InputSpec


def load_weights(module: nn.Module, path: Path) -> None:
    """Puts the tensors of a file into a module.

    Raises ValueError if the file is missing, is no safetensors file, or has other names, shapes or
    types than the module.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        found = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    wanted = module.state_dict()
    if found.keys() != wanted.keys():
        raise ValueError(f"{path} has tensors {sorted(found)}, and {sorted(wanted)} are wanted")
    for name, tensor in wanted.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            got, want = [*found[name].shape], [*tensor.shape]
            text = f"{path}: {name} is {found[name].dtype} of shape {got}"
            raise ValueError(f"{text}, and {tensor.dtype} of shape {want} is wanted")
    module.load_state_dict(found)


class Pretrained(nn.Module):
    """A pretrained hidden layer, then a new linear one.

    Args:
        weights: the path of the file; a relative one starts where the program was started.
        width: H of the pretrained layer.
        frozen: whether the pretrained layer stays as it is.
    """

    # What FedHSSL averages.
    top_layers = ("last",)

    def __init__(
        self,
        spec: InputSpec,
        embedding_size: int,
        *,
        weights: str,
        width: int = 64,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(spec.shape[0], width))
        load_weights(self.body, Path(weights))
        self.body.requires_grad_(not frozen)
        self.last = nn.Linear(width, embedding_size)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Embeds a batch, float32 [B, F] -> [B, D]."""
        z_BD: Tensor = self.last(torch.relu(self.body(x_BF)))
        return z_BD
