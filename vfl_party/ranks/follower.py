"""Runs the ranks other than 0, which compute what rank 0 requests. They have rows and weights, but
no state for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.errors import InternalError
from vfl_party.base.seeds import derive_seed
from vfl_party.models import InputSpec, TwoTowers
from vfl_party.models.training import Precision, backward
from vfl_party.ranks.group import Ranks, Word, convert_rank_errors
from vfl_party.ranks.rows import RankRows
from vfl_party.ranks.spread import OnRanks, describe_structure

# Makes an encoder for an input spec. True for the encoder that all phases share, False for an
# additional encoder of a phase.
Make = Callable[[InputSpec, bool], nn.Module]


def follow(ranks: Ranks, rows: RankRows, make: Make, precision: Precision) -> None:
    """Computes until rank 0 sends END. Raises RankLost if rank 0 ended without END.

    make: Makes encoders on the CPU. Their initial weights do not matter, because each batch comes
    with rank 0's weights.
    """
    share: _Share | None = None
    while True:
        with convert_rank_errors():
            word, facts, arrays = ranks.receive_command()
            match word:
                case Word.END:
                    return
                case Word.BEGIN:
                    share = None
                    if rows.begin(facts, arrays):
                        share = _Share(ranks, rows, make, precision)
                case Word.VIEWS:
                    rows.views(facts, arrays)
                case _ if share is None:
                    raise InternalError(f"rank 0 sent {word.name} before it sent rows")
                case Word.ENCODER:
                    share.add(facts["structure"], trains=facts["trains"])
                case Word.FORWARD:
                    share.forward(facts, rows.batches(facts["batches"], arrays))
                case Word.BACKWARD:
                    share.backward(facts["encoder"])


class _Share:
    """Computes this rank's rows of each batch."""

    def __init__(self, ranks: Ranks, rows: RankRows, make: Make, precision: Precision) -> None:
        self._ranks, self._make, self._precision = ranks, make, precision
        self._spec = rows.features.spec
        self._encoders: list[OnRanks] = []
        # {number of the encoder: its last embeddings, which wait for a gradient}.
        self._z: dict[int, Tensor] = {}

    def add(self, wanted: str, *, trains: bool) -> None:
        """Adds the encoder whose structure is ``wanted``: the shared encoder, one of its two
        towers, or an additional encoder.
        """
        encoder = next(
            (
                candidate
                for candidate in self._make_candidates()
                if describe_structure(candidate) == wanted
            ),
            None,
        )
        if encoder is None:
            raise InternalError("a phase has an encoder of another kind than the party's encoder")
        if not trains:
            # An encoder without training, such as a moving average, gets no gradients.
            encoder.requires_grad_(requires_grad=False)
        ranks, encoder = self._ranks, encoder.to(self._ranks.device)
        self._encoders.append(OnRanks(ranks, encoder, self._spec, self._precision, trains=trains))

    def _make_candidates(self) -> Iterator[nn.Module]:
        shared = self._make(self._spec, True)
        yield shared
        if isinstance(shared, TwoTowers):
            yield from (shared.cross, shared.local)
        yield self._make(self._spec, False)

    def forward(self, facts: dict[str, Any], batches: list[tuple[Tensor, ...]]) -> None:
        """Embeds this rank's rows of batches with rank 0's weights, and sends the embeddings to
        rank 0.
        """
        ranks, number = self._ranks, facts["encoder"]
        shared = self._encoders[number]
        shared.encoder.train(facts["training"])
        if facts["training"]:
            # Each rank has its own seed, so that dropout masks differ.
            torch.manual_seed(derive_seed(facts["seed"], "rank", ranks.rank))
        ranks.spread(shared.encoder)
        with torch.set_grad_enabled(facts["learns"]):
            z_BD = shared(batches)
        if facts["learns"]:
            self._z[number] = z_BD
        ranks.send([z_BD], [0])

    def backward(self, number: int) -> None:
        """Receives the gradient of the last embeddings and runs the backward pass, which sums the
        gradients of the weights at rank 0.
        """
        z_BD = self._z.pop(number)
        dz_BD = torch.empty_like(z_BD)
        self._ranks.receive([dz_BD], [0])
        for parameter in self._encoders[number].encoder.parameters():
            parameter.grad = None
        backward(z_BD, dz_BD)
