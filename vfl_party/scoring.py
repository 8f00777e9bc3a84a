"""The joint forward pass without training, both sides: validation, test and prediction share it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_party.context import Party, Rows
from vfl_party.exchange import NOTHING, expect
from vfl_party.models import combine, combined_size
from vfl_party.traffic import Exchange, with_active

CHUNK_ROWS = 1024


def chunks(rows: Rows) -> list[Rows]:
    return [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]


@torch.no_grad()
def embed(party: Party, rows: Rows) -> Tensor:
    """The party's own embeddings of ``rows`` in eval mode, [N, D]."""
    features = party.need_features()
    party.models["encoder"].eval()
    found = [party.encode(*features.inputs(chunk)) for chunk in chunks(rows)]
    return torch.cat(found) if found else torch.empty(0, party.embedding_size, device=party.device)


@torch.no_grad()
def send_embeddings(
    party: Party,
    phase: str,
    round_: int,
    first_batch: int,
    rows: Rows,
    noise: Callable[[Tensor], Tensor] = lambda z_BD: z_BD,
) -> int:
    """Passive side: embeds ``rows`` in eval mode and sends them, a chunk a step. Returns the next batch number.

    ``noise``: what is sent of an embedding.
    """
    link, features = party.need_link(), party.need_features()
    party.models["encoder"].eval()
    for batch, chunk in enumerate(chunks(rows), first_batch):
        z_BD = noise(party.encode(*features.inputs(chunk)))
        link.swap(StepKey(phase, round_, batch), Kind.EMBEDDING, {"z": z_BD}, NOTHING)
    return first_batch + len(chunks(rows))


def scoring_traffic(party: Party, phase: str, round_: int, first_batch: int, rows: Rows) -> list[Exchange]:
    """What the joint forward pass over ``rows`` exchanges, for a forecast."""
    shapes = [(len(chunk), party.embedding_size) for chunk in chunks(rows)]
    specs = [expect(Kind.EMBEDDING, z=(torch.float32, shape)) for shape in shapes]
    return [with_active(party, StepKey(phase, round_, batch), up) for batch, up in enumerate(specs, first_batch)]


@torch.no_grad()
def joint_embeddings(party: Party, phase: str, round_: int, first_batch: int, rows: Rows) -> tuple[Tensor, int]:
    """Active side: all parties' embeddings of ``rows``, combined, [N, D], and the next batch number."""
    hub, rule = party.need_hub(), party.recipe.model.combine
    if party.features is not None:
        party.models["encoder"].eval()
    combined = []
    for batch, chunk in enumerate(chunks(rows), first_batch):
        step = StepKey(phase, round_, batch)
        own = [party.encode(*party.features.inputs(chunk))] if party.features is not None else []
        spec = expect(Kind.EMBEDDING, z=(torch.float32, (len(chunk), party.embedding_size)))
        received = hub.collect(step, spec)
        hub.acknowledge(step, received)
        combined.append(combine(rule, [*own, *(tensors["z"] for tensors in received.values())]))
    if not combined:
        width = combined_size(rule, len(party.recipe.passives) + (party.features is not None), party.embedding_size)
        return torch.empty(0, width, device=party.device), first_batch
    return torch.cat(combined), first_batch + len(combined)


@torch.no_grad()
def joint_outputs(party: Party, phase: str, round_: int, first_batch: int, rows: Rows) -> tuple[Tensor, int]:
    """Active side: the top model's outputs [N, O] for ``rows`` in eval mode, and the next batch number."""
    z_ND, after = joint_embeddings(party, phase, round_, first_batch, rows)
    party.models["top"].eval()
    outputs = [party.outputs(z_BD) for z_BD in torch.split(z_ND, CHUNK_ROWS)] if len(z_ND) else []
    return torch.cat(outputs) if outputs else torch.empty(0, party.recipe.task.outputs, device=party.device), after
