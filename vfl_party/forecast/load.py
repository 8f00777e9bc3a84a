"""Measures what a party's encoder computes for a row, and keeps in memory."""

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
    """Yields the load of the encoder of each party in this process that has features, in the order
    of the recipe.
    """
    here = {party.name: party, **party.others}
    for name in (party_.name for party_ in party.recipe.parties):
        one = here.get(name)
        if one is not None and one.features is not None and "encoder" in one.models:
            yield _load_of(one, one.models["encoder"], one.features.spec)


def _load_of(party: Party, encoder: nn.Module, spec: InputSpec) -> EncoderLoad:
    # A copy, so that statistics of batch normalisation are unchanged.
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
    """Returns the floating-point operations of one forward pass; a multiply-add counts as two."""
    # Imported here: it takes a second, and only a forecast needs it.
    from torch.utils.flop_counter import FlopCounterMode

    encoder.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(*inputs)
    return int(counter.get_total_flops())


def _count_saved_bytes(encoder: nn.Module, inputs: list[Tensor]) -> int:
    """Returns the bytes that a forward pass in training saves for the backward pass, without the
    weights.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    saved: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    encoder.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        # The output holds the saved tensors until they are counted.
        out = encoder(*inputs)
    del out
    return sum(saved.values())
