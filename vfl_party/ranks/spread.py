"""Runs one encoder on all ranks. The code is the same at rank 0 and at the other ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl_party.models import InputSpec, forward
from vfl_party.models.training import Precision
from vfl_party.ranks.group import Ranks
from vfl_party.ranks.reduce import SequentialEncoder, make_parallel


class OnRanks:
    """This rank's part of an encoder on all ranks. All ranks must make it together.

    ``trains``: Whether its weights may get gradients, which are then summed at rank 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        encoder: nn.Module,
        spec: InputSpec,
        precision: Precision,
        *,
        trains: bool,
    ) -> None:
        self.encoder = synchronize_norms(ranks, encoder)
        self._precision = precision
        self._alone = SequentialEncoder(self.encoder, 2 if spec.cardinalities else 1)
        self._parallel = make_parallel(self._alone, ranks.device, ranks.tensors) if trains else None

    def __call__(self, batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Embeds this rank's rows of K batches. Returns [K B, D]."""
        inputs = [x for batch in batches for x in batch]
        learns = torch.is_grad_enabled() and self._parallel is not None
        model = self._parallel if learns and self._parallel is not None else self._alone
        return forward(model, *inputs, precision=self._precision)


def synchronize_norms(ranks: Ranks, encoder: nn.Module) -> nn.Module:
    """Makes an encoder's batch normalisation use the rows of all ranks. The names in its state stay
    the same.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(encoder, ranks.tensors)  # type: ignore[no-untyped-call]
    return converted


def trains(encoder: nn.Module) -> bool:
    """Returns whether any of an encoder's weights may get a gradient."""
    return any(parameter.requires_grad for parameter in encoder.parameters())


def describe_structure(encoder: nn.Module) -> str:
    """Describes an encoder's layers and the shapes of its state. Two encoders have the same
    description if the weights of one fit the other.
    """
    layers = re.sub(r"(Sync)?BatchNorm(\dd)?", "BatchNorm", repr(encoder))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in encoder.state_dict().items()]
    return f"{layers}\n{shapes}"
