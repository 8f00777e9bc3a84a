"""Measures the operations and the memory of a party's encoder for each row."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from vfl_party.forecast.result import EncoderLoad
from vfl_party.models import InputSpec
from vfl_party.phases.context import Party

# Batch normalisation needs more than one row.
_ROWS = 2


def encoder_loads(party: Party) -> Iterator[EncoderLoad]:
    """Yields the encoder's load for each party in this process that has an encoder.

    The parties are in the order of the recipe.
    """
    parties = {party.name: party, **party.others}
    for name in (party_.name for party_ in party.recipe.parties):
        party_here = parties.get(name)
        if (
            party_here is not None
            and party_here.features is not None
            and "encoder" in party_here.models
        ):
            yield _measure_load(party_here, party_here.models["encoder"], party_here.features.spec)


def _measure_load(party: Party, encoder: nn.Module, spec: InputSpec) -> EncoderLoad:
    # This measures a copy, so that the batch normalisation statistics stay unchanged.
    encoder = deepcopy(encoder)
    inputs = [torch.zeros(_ROWS, *spec.shape)]
    if spec.cardinalities:
        inputs.append(torch.zeros(_ROWS, len(spec.cardinalities), dtype=torch.int64))
    weights = list(encoder.parameters())
    with torch.random.fork_rng(devices=[]):
        return EncoderLoad(
            party=party.name,
            rows=len(party.rows("local")),
            weights=sum(weight.numel() for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
            flops_a_row=flops(encoder, inputs) // _ROWS,
            kept_bytes_a_row=_count_saved_bytes(encoder, inputs) // _ROWS,
        )


def flops(encoder: nn.Module, inputs: list[Tensor]) -> int:
    """Returns the floating-point operations of a forward pass. A multiply-add counts as two."""
    # This import takes a second and is only needed for a forecast.
    from torch.utils.flop_counter import FlopCounterMode

    encoder.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(*inputs)
    return int(counter.get_total_flops())


def _count_saved_bytes(encoder: nn.Module, inputs: list[Tensor]) -> int:
    """Returns the bytes, without weights, that a forward pass saves for the backward pass."""
    weight_storages = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    saved: dict[int, int] = {}

    def count_storage(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    encoder.train()
    with torch.autograd.graph.saved_tensors_hooks(count_storage, lambda value: value):
        # The output keeps the saved tensors alive until they are counted.
        out = encoder(*inputs)
    del out
    return sum(saved.values())
