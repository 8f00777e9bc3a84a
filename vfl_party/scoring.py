"""The joint forward pass without training, both sides: validation, test and prediction share it."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_party.context import Party
from vfl_party.declared import Exchange, Occurrence, Sent, f32, noise
from vfl_party.exchange import Answering, Asking
from vfl_party.models import combine, combined_size
from vfl_party.seeds import Rows

CHUNK_ROWS = 1024


def scoring(sigma: float = 0.0, *, name: str = "scoring", when: str = "every round") -> Exchange:
    """Declares the exchange of the joint forward pass: embeddings up, an acknowledgement down.

    ``sigma``: σ of the noise that passive parties add. Its shapes have the words ``rows`` and ``width``.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, noise("gaussian", sigma=sigma))
    return Exchange(name, up, when=f"{when}, {CHUNK_ROWS:,} rows a message")


def chunks(rows: Rows) -> list[Rows]:
    return [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]


@torch.no_grad()
def embed(party: Party, rows: Rows) -> Tensor:
    """Returns the party's own embeddings of ``rows`` in eval mode, [N, D]."""
    features = party.need_features()
    party.models["encoder"].eval()
    found = [party.encode(*features.inputs(chunk)) for chunk in chunks(rows)]
    return torch.cat(found) if found else torch.empty(0, party.embedding_size, device=party.device)


@torch.no_grad()
def send_embeddings(party: Party, scores: Asking, round_: int, first_batch: int, rows: Rows) -> int:
    """Embeds ``rows`` in eval mode and sends them, a chunk a step: the passive side. Returns the next batch number.

    ``scores``: the asking side of the exchange ``scoring``.
    """
    features = party.need_features()
    party.models["encoder"].eval()
    for batch, chunk in enumerate(chunks(rows), first_batch):
        z_BD = party.encode(*features.inputs(chunk))
        scores.swap(StepKey(scores.phase, round_, batch), {"z": z_BD})
    return first_batch + len(chunks(rows))


def scoring_traffic(
    party: Party, phase: str, exchange: Exchange, round_: int, first_batch: int, rows: Rows
) -> list[Occurrence]:
    """Returns the exchanges of the joint forward pass over ``rows``; ``exchange``: as ``scoring`` made it."""
    return [
        Occurrence.of(exchange, StepKey(phase, round_, batch), rows=len(chunk), width=party.embedding_size)
        for batch, chunk in enumerate(chunks(rows), first_batch)
    ]


@torch.no_grad()
def joint_embeddings(party: Party, scores: Answering, round_: int, first_batch: int, rows: Rows) -> tuple[Tensor, int]:
    """Returns all parties' embeddings of ``rows``, combined, [N, D], and the next batch number: the active side."""
    rule = party.recipe.model.combine
    if party.features is not None:
        party.models["encoder"].eval()
    combined = []
    for batch, chunk in enumerate(chunks(rows), first_batch):
        step = StepKey(scores.phase, round_, batch)
        own = [party.encode(*party.features.inputs(chunk))] if party.features is not None else []
        received = scores.collect(step, rows=len(chunk))
        scores.acknowledge(step, received)
        combined.append(combine(rule, [*own, *(tensors["z"] for tensors in received.values())]))
    if not combined:
        width = combined_size(rule, len(party.recipe.passives) + (party.features is not None), party.embedding_size)
        return torch.empty(0, width, device=party.device), first_batch
    return torch.cat(combined), first_batch + len(combined)


@torch.no_grad()
def joint_outputs(party: Party, scores: Answering, round_: int, first_batch: int, rows: Rows) -> tuple[Tensor, int]:
    """Returns the top model's outputs [N, O] for ``rows`` in eval mode, and the next batch number: the active side."""
    z_ND, after = joint_embeddings(party, scores, round_, first_batch, rows)
    party.models["top"].eval()
    outputs = [party.outputs(z_BD) for z_BD in torch.split(z_ND, CHUNK_ROWS)] if len(z_ND) else []
    return torch.cat(outputs) if outputs else torch.empty(0, party.recipe.task.outputs, device=party.device), after
