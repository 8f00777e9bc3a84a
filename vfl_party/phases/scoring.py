"""Computes the joint forward pass without training: from rows to scores and the parties that took
part.

Validation, evaluation and prediction use it. A scorer needs models and an exchange, but no run,
generation or alignment. Rows are row numbers. The parties must agree on the rows and on the first
step before they call a scorer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, Lenience, StepKey, StepPassed
from vfl_common.errors import InternalError
from vfl_party.base.seeds import Rows, group_rows
from vfl_party.models import combine, forward
from vfl_party.models.row_blocks import ROWS, in_blocks
from vfl_party.models.top import learnt_stand_ins
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, f32, noise
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.absence import Following, LatePolicy, fill_missing
from vfl_party.phases.context import Party

CHUNK_ROWS = 1024
# The name of the model with which the active party scores rows without the other parties.
SOLO = "solo"


@dataclass(frozen=True)
class Scored:
    """The result of a joint forward pass.

    ``outputs``: The model's outputs, [N, O], in the order of the rows. ``without``: {passive party:
    number of rows that were scored without it}. A party that is not in ``without`` took part for
    all rows. ``steps``: The number of exchanged steps.

    ``by``: None, or if each party has other rows, {passive party: bool [N], which rows it has}.
    Then the first party in the recipe that has a row scores it. The outputs of a row that no party
    has are without meaning. ``unlisted``: {passive party: number of its rows that were not
    requested}.
    """

    outputs: Tensor
    without: Mapping[str, int]
    steps: int
    by: Mapping[str, npt.NDArray[np.bool_]] | None = None
    unlisted: Mapping[str, int] = field(default_factory=dict)


class Scorer(Protocol):
    """One party's side of the joint forward pass: the active party scores, the others answer.

    All parties must pass the same rows, in common row numbers, and the same first step. The batch
    number increases by one in each following step.
    """

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Scores ``rows`` together with the passive parties. Called at the active party. Raises as
        ``Answering.collect``.
        """
        ...

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Takes part in scoring ``rows``. Called at a passive party. Returns the number of steps.
        Raises as ``Asking.swap``.
        """
        ...


@dataclass(frozen=True)
class Chunk:
    """All parties' embeddings [B, D] of a chunk of rows; None for a party that is absent.

    ``held``: {passive party: the positions in the chunk of the rows that it has}, in the order of
    its embeddings; None if all parties have all rows.
    """

    own: list[Tensor]
    others: dict[str, Tensor | None]
    rows: int = 0
    held: Mapping[str, Rows] | None = None

    def of(self, parties: Collection[str]) -> Chunk:
        """Returns the chunk as if all passive parties except ``parties`` were absent."""
        others = {name: z if name in parties else None for name, z in self.others.items()}
        return Chunk(self.own, others, self.rows, self.held)

    def by_holders(self) -> Iterator[tuple[Chunk, Rows]]:
        """Groups the rows by the parties that have them. Yields each group as a chunk in which the
        other parties are absent, and the positions of its rows in this chunk.
        """
        if self.held is None:
            yield self, np.arange(self.rows)
            return
        present = {name: z for name, z in self.others.items() if z is not None}
        masks = []
        for name in present:
            masks.append(np.zeros(self.rows, bool))
            masks[-1][self.held[name]] = True
        for names, at in group_rows([*present], masks) if present else [((), np.arange(self.rows))]:
            others = {
                name: present[name][torch.from_numpy(np.searchsorted(self.held[name], at))]
                if name in names
                else None
                for name in self.others
            }
            yield Chunk([z[torch.from_numpy(at)] for z in self.own], others, len(at)), at

    def without(self, party: str) -> Chunk:
        """Returns the chunk as if ``party`` were absent."""
        return self.of([name for name in self.others if name != party])

    def first(self) -> Chunk:
        """Returns a chunk with only the first row."""
        others = {name: None if z is None else z[:1] for name, z in self.others.items()}
        return Chunk([z[:1] for z in self.own], others, 1)


class SplitScorer:
    """A ``Scorer`` with encoders and a top model in eval mode. Each step scores a chunk of rows.

    Args:
        exchange: The exchange that ``scoring`` declares. The constructor opens this party's side of
            it.
        policy: The policy for the embeddings of absent parties (``cached`` means zeros here); None
            for the course's policy. Learnt stand-ins take precedence.
        following: Tracks the current step at a passive party, if the others may continue without
            it.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        exchange: Exchange,
        *,
        policy: LatePolicy | None = None,
        following: Following | None = None,
    ) -> None:
        self._party, self._policy, self._following = party, policy, following
        self._side: Answering | Asking
        if party.role == "active":
            self._side = party.exchanges.open_answering(
                phase, exchange, width=party.exchanges.widths or party.exchanges.width
            )
        else:
            self._side = party.exchanges.open_asking(phase, exchange, width=party.exchanges.width)
        if isinstance(self._side, Asking):
            self._side.lenient = following is not None

    def score(self, rows: Rows, first: StepKey, lenience: Lenience | None = None) -> Scored:
        """See ``Scorer.score``. ``lenience``: Allows scoring without missing parties; see
        ``Answering.collect``.
        """
        return self.scored(self.embeddings(rows, first, lenience))

    def embeddings(
        self, rows: Rows, first: StepKey, lenience: Lenience | None = None
    ) -> Iterator[Chunk]:
        """Yields all parties' embeddings of ``rows``, one chunk for each step. This is the first
        half of ``score``.
        """
        return self._collect_chunks(self.answering, rows, first, lenience)

    @property
    def answering(self) -> Answering:
        """The active party's side of the exchange, for further exchanges such as stand-ins."""
        if not isinstance(self._side, Answering):
            raise InternalError(f"{self._party.name} is a passive party, so it cannot score")
        return self._side

    @property
    def asking(self) -> Asking:
        """A passive party's side of the exchange; see ``answering``."""
        if not isinstance(self._side, Asking):
            raise InternalError(f"{self._party.name} is the active party, so it cannot answer")
        return self._side

    @torch.no_grad()
    def _collect_chunks(
        self, side: Answering, rows: Rows, first: StepKey, lenience: Lenience | None
    ) -> Iterator[Chunk]:
        party = self._party
        if party.rows.features is not None:
            party.models["encoder"].eval()
        for step, chunk in _divide_into_steps(rows, first):
            own_embeddings = [embed_rows(party, chunk)] if party.rows.features is not None else []
            sizes, held = party.rows.get_sizes(chunk), party.rows.data.held
            received: dict[str, dict[str, Tensor]] = {}
            # If no other party has any of the rows, they are scored without an exchange.
            if sizes is None or sizes:
                received = side.collect(step, lenience=lenience, each=sizes, rows=len(chunk))
                side.acknowledge(step, received)
            z_BD = {
                peer.name: received[peer.name]["z"] if peer.name in received else None
                for peer in party.recipe.modelled
                if peer.role == "passive"
            }
            positions = None if held is None else {name: held.of(name, chunk) for name in received}
            yield Chunk(own_embeddings, z_BD, len(chunk), positions)

    @torch.no_grad()
    def scored(self, embedded: Iterable[Chunk]) -> Scored:
        """Scores embeddings with the top model. This is the second half of ``score``."""
        party, policy = self._party, self._policy or self._party.course.without
        rule, top = party.recipe.model.combine, party.models["top"]
        modelled = [peer.name for peer in party.recipe.modelled]
        widths = {name: party.recipe.embedding_size(name) for name in modelled}
        stand_ins = learnt_stand_ins(party.models)
        top.eval()
        outputs, without = [], Counter[str]()
        for chunk in embedded:
            parts, places = [], []
            for block, at in chunk.by_holders():
                z_BD = combine(
                    rule, fill_missing(policy, rule, block.own, block.others, widths, stand_ins)
                )
                parts.append(compute_outputs(party, z_BD))
                places.append(at)
                without.update({name: block.rows for name, z in block.others.items() if z is None})
            outputs_BO = parts[0] if len(parts) == 1 else torch.cat(parts)
            if len(parts) > 1:
                outputs_BO = party.rows.take(outputs_BO, np.argsort(np.concatenate(places)))
            outputs.append(outputs_BO)
        empty = torch.empty(0, party.recipe.task.outputs, device=party.device)
        return Scored(torch.cat(outputs) if outputs else empty, without, len(outputs))

    @torch.no_grad()
    def answer(self, rows: Rows, first: StepKey) -> int:
        """Embeds ``rows`` and sends them; see ``Scorer.answer``."""
        party, side, following = self._party, self.asking, self._following
        party.rows.need_features()
        party.models["encoder"].eval()
        for step, joint in _divide_into_steps(rows, first):
            chunk = party.rows.select_own(joint)
            if not len(chunk) or (following is not None and following.is_over(step)):
                continue
            z_BD = embed_rows(party, chunk)
            try:
                side.swap(step, {"z": z_BD}, chunk)
            except StepPassed as passed:
                if following is None:
                    raise
                following.skip(step, passed)
        return len(split_into_chunks(rows))


class SoloScorer:
    """A ``Scorer`` with a model on the active party's own columns. It exchanges nothing.

    ``model``: Maps the encoder's inputs to outputs [B, O]. It is set to eval mode.
    """

    def __init__(self, party: Party, model: nn.Module) -> None:
        self._party, self._model = party, model

    @torch.no_grad()
    def outputs(self, rows: Rows) -> Tensor:
        """Returns the model's outputs for ``rows``, [N, O]."""
        party, features = self._party, self._party.rows.need_features()
        self._model.eval()
        model = partial(forward, self._model, precision=party.recipe.model.precision)
        outputs = [
            in_blocks(model, party.scores.blocks.get(SOLO), *features.inputs(chunk))
            for chunk in features.expecting(split_into_chunks(rows))
        ]
        empty = torch.empty(0, party.recipe.task.outputs, device=party.device)
        return torch.cat(outputs) if outputs else empty

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """See ``Scorer.score``. Exchanges no steps."""
        _ = first
        return Scored(self.outputs(rows), {}, 0)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Always raises InternalError, because no passive party takes part."""
        _ = rows, first
        raise InternalError(
            f"{self._party.name}: a model of the active party alone has no passive side"
        )


def scoring(
    sigma: float = 0.0, *, name: str = "scoring", when: str = "every round", how: str = ""
) -> Exchange:
    """Declares the exchange of the joint forward pass: embeddings up, an acknowledgement down.

    ``sigma``: The standard deviation of the noise that passive parties add. ``how``: See ``Sent``.
    The shapes of the exchange contain the sizes ``rows`` and ``width``.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, noise("gaussian", sigma=sigma), how=how)
    return Exchange(name, up, when=f"{when}, {CHUNK_ROWS:,} rows a message")


def scoring_traffic(
    party: Party, phase: str, exchange: Exchange, round_: int, first_batch: int, rows: Rows
) -> list[Occurrence]:
    """Returns the exchanges of the joint forward pass over ``rows``, for a forecast. ``exchange``:
    The exchange that ``scoring`` declares.
    """
    return [
        occurrence
        for step, chunk in _divide_into_steps(rows, StepKey(phase, round_, first_batch))
        for occurrence in party.exchanges.list_joint_occurrences(exchange, step, chunk)
    ]


def embed_rows(party: Party, rows: Rows) -> Tensor:
    """Returns the party's embeddings [B, D] of its own rows, computed in blocks; see
    ``vfl_party.models.row_blocks``.
    """
    features = party.rows.need_features()
    if party.encode.on_one_device:
        return in_blocks(party.encode, party.scores.blocks.get("encoder"), *features.inputs(rows))
    # The party's other processes make their inputs from row numbers. So row numbers, not inputs,
    # are repeated to fill a block.
    padded = np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % ROWS)])
    return party.encode(*features.inputs(padded))[: len(rows)]


def compute_outputs(party: Party, z_BD: Tensor) -> Tensor:
    """Returns the top model's outputs [B, O] for combined embeddings [B, …], computed in blocks;
    see ``vfl_party.models.row_blocks``.
    """
    return in_blocks(party.outputs, party.scores.blocks.get("top"), z_BD)


def split_into_chunks(rows: Rows) -> list[Rows]:
    """Divides rows into chunks of at most ``CHUNK_ROWS``."""
    return [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]


@torch.no_grad()
def embed(party: Party, rows: Rows) -> Tensor:
    """Returns the party's embeddings of its own ``rows`` in eval mode, [N, D]."""
    features = party.rows.need_features()
    party.models["encoder"].eval()
    parts = [embed_rows(party, chunk) for chunk in features.expecting(split_into_chunks(rows))]
    return torch.cat(parts) if parts else torch.empty(0, party.exchanges.width, device=party.device)


def _divide_into_steps(rows: Rows, first: StepKey) -> list[tuple[StepKey, Rows]]:
    """Divides ``rows`` into chunks. Returns each chunk with its step."""
    return [
        (StepKey(first.phase, first.round, batch), chunk)
        for batch, chunk in enumerate(split_into_chunks(rows), first.batch)
    ]
