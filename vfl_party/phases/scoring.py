"""The joint forward pass without training: rows in, scores and who took part out.

Validation, evaluation and prediction share it. A scorer knows models and an exchange, and nothing
of runs, generations and alignment: the rows are positions in what each party holds, and the parties
agree on them and on the first step before they call it.
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

from vfl_common.bundle import Kind, StepKey
from vfl_common.errors import InternalError
from vfl_common.link import Lenience, StepPassed
from vfl_party.base.held import group_rows
from vfl_party.base.seeds import Rows
from vfl_party.models import combine, forward
from vfl_party.models.row_blocks import ROWS, in_blocks
from vfl_party.models.top.stand_ins import learnt_stand_ins
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, f32, noise
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.absence import Following, LatePolicy, fill_missing
from vfl_party.phases.context import Party

CHUNK_ROWS = 1024
# Among a party's models: that with which the active party scores rows by itself.
SOLO = "solo"


@dataclass(frozen=True)
class Scored:
    """The result of a joint forward pass.

    ``outputs``: the model's, [N, O], in the order of the rows. ``without``: {passive party: how
    many rows were scored without it}; a party that is not in it took part in all. ``steps``:
    how many steps were exchanged.

    If the parties hold different rows, ``by`` has {passive party: whether it holds each row, [N]}:
    the first of them in the recipe has scored it, and the outputs of a row that none holds have no
    meaning. ``unlisted``: {passive party: how many rows it holds that nobody asked for}.
    """

    outputs: Tensor
    without: Mapping[str, int]
    steps: int
    by: Mapping[str, npt.NDArray[np.bool_]] | None = None
    unlisted: Mapping[str, int] = field(default_factory=dict)


class Scorer(Protocol):
    """One party's side of the joint forward pass: the active party scores, the others answer.

    All give the same rows, as all parties count them, and the same first step; the following steps
    count its batch up.
    """

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Scores ``rows`` with the others: the active party. Raises as ``Answering.collect``."""
        ...

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Helps to score ``rows``: a passive party. Returns the number of steps. Raises as
        ``Asking.swap``.
        """
        ...


@dataclass(frozen=True)
class Chunk:
    """All parties' embeddings [B, D] of some rows; None for a party that is absent.

    ``held``: {passive party: the places in the chunk of the rows that it holds, and whose
    embeddings are here}; None if all hold all.
    """

    own: list[Tensor]
    others: dict[str, Tensor | None]
    rows: int = 0
    held: Mapping[str, Rows] | None = None

    def of(self, parties: Collection[str]) -> Chunk:
        """Returns the embeddings as if no passive party but ``parties`` were there."""
        others = {name: z if name in parties else None for name, z in self.others.items()}
        return Chunk(self.own, others, self.rows, self.held)

    def by_holders(self) -> Iterator[tuple[Chunk, Rows]]:
        """Yields the rows that the same parties hold, as a chunk in which the others are absent,
        and their places in this chunk.
        """
        if self.held is None:
            yield self, np.arange(self.rows)
            return
        there = {name: z for name, z in self.others.items() if z is not None}
        masks = []
        for name in there:
            masks.append(np.zeros(self.rows, bool))
            masks[-1][self.held[name]] = True
        for names, at in group_rows([*there], masks) if there else [((), np.arange(self.rows))]:
            others = {
                name: there[name][torch.from_numpy(np.searchsorted(self.held[name], at))]
                if name in names
                else None
                for name in self.others
            }
            yield Chunk([z[torch.from_numpy(at)] for z in self.own], others, len(at)), at

    def without(self, party: str) -> Chunk:
        """Returns the embeddings as if ``party`` were absent."""
        return self.of([name for name in self.others if name != party])

    def first(self) -> Chunk:
        """Returns the embeddings of the first row alone."""
        others = {name: None if z is None else z[:1] for name, z in self.others.items()}
        return Chunk([z[:1] for z in self.own], others, 1)


class SplitScorer:
    """The ``Scorer`` of encoders and a top model, which work in eval mode, a chunk of rows a step.

    Args:
        exchange: as ``scoring`` declares it; opened here, for this party's role.
        policy: what stands in for absent parties (``cached`` means zeros here); None: that of the
            course. What the model has learnt comes before it.
        following: a passive party's place, if the others may go on without it.
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
            self._side = party.answering(
                phase, exchange, width=party.widths or party.embedding_size
            )
        else:
            self._side = party.asking(phase, exchange, width=party.embedding_size)
        if isinstance(self._side, Asking):
            self._side.lenient = following is not None

    def score(self, rows: Rows, first: StepKey, lenience: Lenience | None = None) -> Scored:
        """See ``Scorer.score``. ``lenience``: lets it go on without parties; see
        ``Answering.collect``.
        """
        return self.scored(self.embeddings(rows, first, lenience))

    def embeddings(
        self, rows: Rows, first: StepKey, lenience: Lenience | None = None
    ) -> Iterator[Chunk]:
        """Yields all parties' embeddings of ``rows``, a chunk a step: the first half of
        ``score``.
        """
        return self._collect_chunks(self.answering, rows, first, lenience)

    @property
    def answering(self) -> Answering:
        """The active party's side of the exchange, for more embeddings than those of rows."""
        if not isinstance(self._side, Answering):
            raise InternalError(f"{self._party.name} is a passive party, and cannot score")
        return self._side

    @property
    def asking(self) -> Asking:
        """A passive party's side of the exchange; see ``answering``."""
        if not isinstance(self._side, Asking):
            raise InternalError(f"{self._party.name} is the active party, and has nobody to answer")
        return self._side

    @torch.no_grad()
    def _collect_chunks(
        self, side: Answering, rows: Rows, first: StepKey, lenience: Lenience | None
    ) -> Iterator[Chunk]:
        party = self._party
        if party.features is not None:
            party.models["encoder"].eval()
        for step, chunk in _steps(rows, first):
            own = [embed_rows(party, chunk)] if party.features is not None else []
            sizes, held = party.sizes_of(chunk), party.data.held
            received: dict[str, dict[str, Tensor]] = {}
            # Rows of which no other party holds any are scored alone.
            if sizes is None or sizes:
                received = side.collect(step, lenience=lenience, each=sizes, rows=len(chunk))
                side.acknowledge(step, received)
            z_BD = {
                peer.name: received[peer.name]["z"] if peer.name in received else None
                for peer in party.recipe.modelled
                if peer.role == "passive"
            }
            of = None if held is None else {name: held.of(name, chunk) for name in received}
            yield Chunk(own, z_BD, len(chunk), of)

    @torch.no_grad()
    def scored(self, embedded: Iterable[Chunk]) -> Scored:
        """Returns the top model's scores for embeddings: the second half of ``score``."""
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
                parts.append(outputs_of(party, z_BD))
                places.append(at)
                without.update({name: block.rows for name, z in block.others.items() if z is None})
            outputs_BO = parts[0] if len(parts) == 1 else torch.cat(parts)
            if len(parts) > 1:
                outputs_BO = party.take(outputs_BO, np.argsort(np.concatenate(places)))
            outputs.append(outputs_BO)
        empty = torch.empty(0, party.recipe.task.outputs, device=party.device)
        return Scored(torch.cat(outputs) if outputs else empty, without, len(outputs))

    @torch.no_grad()
    def answer(self, rows: Rows, first: StepKey) -> int:
        """Embeds ``rows`` and sends them; see ``Scorer.answer``."""
        party, side, following = self._party, self.asking, self._following
        party.need_features()
        party.models["encoder"].eval()
        for step, joint in _steps(rows, first):
            chunk = party.own_rows(joint)
            if not len(chunk) or (following is not None and following.is_over(step)):
                continue
            z_BD = embed_rows(party, chunk)
            try:
                side.swap(step, {"z": z_BD}, chunk)
            except StepPassed as passed:
                if following is None:
                    raise
                following.skip(step, passed)
        return len(chunks(rows))


class SoloScorer:
    """The ``Scorer`` of a model on the active party's own columns: nothing crosses.

    ``model``: from the encoder's inputs to outputs [B, O], in eval mode here.
    """

    def __init__(self, party: Party, model: nn.Module) -> None:
        self._party, self._model = party, model

    @torch.no_grad()
    def outputs(self, rows: Rows) -> Tensor:
        """Returns the model's outputs for ``rows``, [N, O]."""
        party, features = self._party, self._party.need_features()
        self._model.eval()
        model = partial(forward, self._model, precision=party.recipe.model.precision)
        outputs = [
            in_blocks(model, party.scores.blocks.get(SOLO), *features.inputs(chunk))
            for chunk in features.expecting(chunks(rows))
        ]
        empty = torch.empty(0, party.recipe.task.outputs, device=party.device)
        return torch.cat(outputs) if outputs else empty

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """See ``Scorer.score``; without steps."""
        _ = first
        return Scored(self.outputs(rows), {}, 0)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Nobody is asked. Raises InternalError."""
        _ = rows, first
        raise InternalError(f"{self._party.name}: a model of one party asks nobody")


def scoring(
    sigma: float = 0.0, *, name: str = "scoring", when: str = "every round", how: str = ""
) -> Exchange:
    """Declares the exchange of the joint forward pass: embeddings up, an acknowledgement down.

    ``sigma``: σ of the noise that passive parties add. ``how``: see ``Sent``. Its shapes have the
    words ``rows`` and ``width``.
    """
    up = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}, noise("gaussian", sigma=sigma), how=how)
    return Exchange(name, up, when=f"{when}, {CHUNK_ROWS:,} rows a message")


def scoring_traffic(
    party: Party, phase: str, exchange: Exchange, round_: int, first_batch: int, rows: Rows
) -> list[Occurrence]:
    """Returns the exchanges of the joint forward pass over ``rows``; ``exchange``: as ``scoring``
    made it.
    """
    return [
        occurrence
        for step, chunk in _steps(rows, StepKey(phase, round_, first_batch))
        for occurrence in party.joint_occurrences(exchange, step, chunk)
    ]


def embed_rows(party: Party, rows: Rows) -> Tensor:
    """Returns the party's embeddings [B, D] of its own rows, computed in blocks; see
    ``vfl_party.models.row_blocks``.
    """
    features = party.need_features()
    if party.encodes_here:
        return in_blocks(party.encode, party.scores.blocks.get("encoder"), *features.inputs(rows))
    # Other processes of the party make their inputs from the numbers of rows, so rows are repeated
    # here and not inputs.
    whole = np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % ROWS)])
    return party.encode(*features.inputs(whole))[: len(rows)]


def outputs_of(party: Party, z_BD: Tensor) -> Tensor:
    """Returns the top model's outputs [B, O] for combined embeddings [B, …], computed in blocks;
    see ``vfl_party.models.row_blocks``.
    """
    return in_blocks(party.outputs, party.scores.blocks.get("top"), z_BD)


def chunks(rows: Rows) -> list[Rows]:
    """Divides rows into chunks of at most ``CHUNK_ROWS``."""
    return [rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS)]


@torch.no_grad()
def embed(party: Party, rows: Rows) -> Tensor:
    """Returns the party's own embeddings of ``rows`` in eval mode, [N, D]."""
    features = party.need_features()
    party.models["encoder"].eval()
    parts = [embed_rows(party, chunk) for chunk in features.expecting(chunks(rows))]
    return torch.cat(parts) if parts else torch.empty(0, party.embedding_size, device=party.device)


def _steps(rows: Rows, first: StepKey) -> list[tuple[StepKey, Rows]]:
    """Returns the chunks of ``rows``, each with its step."""
    return [
        (StepKey(first.phase, first.round, batch), chunk)
        for batch, chunk in enumerate(chunks(rows), first.batch)
    ]
