"""The joint forward pass without training, both sides: validation, test and prediction share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.link import Lenience, StepPassed
from vfl_party.base.seeds import Rows
from vfl_party.models import combine
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, f32, noise
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.absence import Following, LatePolicy, filled
from vfl_party.phases.context import Party

CHUNK_ROWS = 1024


def scoring(
    sigma: float = 0.0, *, name: str = "scoring", when: str = "every round", how: str = ""
) -> Exchange:
    """Declares the exchange of the joint forward pass: embeddings up, an acknowledgement down.

    ``sigma``: σ of the noise that passive parties add. ``how``: see ``Sent``. Its shapes have the
    words ``rows`` and ``width``.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, noise("gaussian", sigma=sigma), how=how)
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
def send_embeddings(
    party: Party,
    scores: Asking,
    round_: int,
    first_batch: int,
    rows: Rows,
    following: Following | None = None,
) -> int:
    """Embeds ``rows`` in eval mode and sends them, a chunk a step: the passive side. Returns the
    next batch number.

    ``scores``: the asking side of the exchange ``scoring``. ``following``: this party's place, if
    the others may go on without it.
    """
    features = party.need_features()
    party.models["encoder"].eval()
    for batch, chunk in enumerate(chunks(rows), first_batch):
        step = StepKey(scores.phase, round_, batch)
        if following is not None and following.is_over(step):
            continue
        z_BD = party.encode(*features.inputs(chunk))
        try:
            scores.swap(step, {"z": z_BD})
        except StepPassed as passed:
            if following is None:
                raise
            following.skip(step, passed)
    return first_batch + len(chunks(rows))


def scoring_traffic(
    party: Party, phase: str, exchange: Exchange, round_: int, first_batch: int, rows: Rows
) -> list[Occurrence]:
    """Returns the exchanges of the joint forward pass over ``rows``; ``exchange``: as ``scoring``
    made it.
    """
    return [
        Occurrence.of(
            exchange, StepKey(phase, round_, batch), rows=len(chunk), width=party.embedding_size
        )
        for batch, chunk in enumerate(chunks(rows), first_batch)
    ]


@dataclass(frozen=True)
class Chunk:
    """All parties' embeddings [B, D] of some rows; None for a party that is absent."""

    own: list[Tensor]
    others: dict[str, Tensor | None]

    def without(self, party: str) -> Chunk:
        """Returns the embeddings as if ``party`` were absent."""
        return Chunk(self.own, {**self.others, party: None})


@torch.no_grad()
def joint_embeddings(
    party: Party,
    scores: Answering,
    round_: int,
    first_batch: int,
    rows: Rows,
    lenience: Lenience | None = None,
) -> Iterator[Chunk]:
    """Yields all parties' embeddings of ``rows``, a chunk a step: the active side."""
    if party.features is not None:
        party.models["encoder"].eval()
    for batch, chunk in enumerate(chunks(rows), first_batch):
        step = StepKey(scores.phase, round_, batch)
        own = [party.encode(*party.features.inputs(chunk))] if party.features is not None else []
        received = scores.collect(step, lenience=lenience, rows=len(chunk))
        scores.acknowledge(step, received)
        z = {
            each.name: received[each.name]["z"] if each.name in received else None
            for each in party.recipe.passives
        }
        yield Chunk(own, z)


@torch.no_grad()
def outputs_of(party: Party, found: Iterable[Chunk], policy: LatePolicy | None = None) -> Tensor:
    """Returns the top model's outputs [N, O] for embeddings, in eval mode.

    ``policy``: what stands in for absent parties (``cached`` means zeros here); None: that of the
    first phase that goes on without one.
    """
    rule, policy = party.recipe.model.combine, policy or party.late_policy
    party.models["top"].eval()
    outputs = [
        party.outputs(combine(rule, filled(policy, rule, each.own, each.others))) for each in found
    ]
    return (
        torch.cat(outputs)
        if outputs
        else torch.empty(0, party.recipe.task.outputs, device=party.device)
    )


def joint_outputs(
    party: Party,
    scores: Answering,
    round_: int,
    first_batch: int,
    rows: Rows,
    lenience: Lenience | None = None,
    policy: LatePolicy | None = None,
) -> tuple[Tensor, int]:
    """Returns the top model's outputs [N, O] for ``rows`` in eval mode, and the next batch number:
    the active side.
    """
    found = joint_embeddings(party, scores, round_, first_batch, rows, lenience)
    return outputs_of(party, found, policy), first_batch + len(chunks(rows))
