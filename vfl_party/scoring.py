"""The joint forward pass without training, both sides: validation, test and prediction share it."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.models import combine
from vfl_party.context import Party, Rows
from vfl_party.exchange import NOTHING, expect

CHUNK_ROWS = 1024


def chunks(rows: Rows) -> list[Rows]:
    return [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]


@torch.no_grad()
def send_embeddings(party: Party, phase: str, round_: int, first_batch: int, rows: Rows) -> int:
    """Passive side: embeds ``rows`` in eval mode and sends them, a chunk a step. Returns the next batch number."""
    link, features, encoder = party.need_link(), party.need_features(), party.models["encoder"]
    encoder.eval()
    for batch, chunk in enumerate(chunks(rows), first_batch):
        z_BD = encoder(*features.inputs(chunk))
        link.swap(StepKey(phase, round_, batch), Kind.EMBEDDING, {"z": z_BD}, NOTHING)
    return first_batch + len(chunks(rows))


@torch.no_grad()
def joint_outputs(party: Party, phase: str, round_: int, first_batch: int, rows: Rows) -> tuple[Tensor, int]:
    """Active side: the top model's outputs [N, O] for ``rows`` in eval mode, and the next batch number."""
    hub = party.need_hub()
    for model in party.models.values():
        model.eval()
    outputs = []
    for batch, chunk in enumerate(chunks(rows), first_batch):
        step = StepKey(phase, round_, batch)
        own = [party.models["encoder"](*party.features.inputs(chunk))] if party.features is not None else []
        spec = expect(Kind.EMBEDDING, z=(torch.float32, (len(chunk), party.embedding_size)))
        received = hub.collect(step, spec)
        hub.acknowledge(step, received)
        z_BD = combine(party.recipe.model.combine, [*own, *(tensors["z"] for tensors in received.values())])
        outputs.append(party.models["top"](z_BD))
    width = party.recipe.task.outputs
    return torch.cat(outputs) if outputs else torch.empty(0, width, device=party.device), first_batch + len(outputs)
