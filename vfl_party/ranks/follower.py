"""The other ranks: they compute what rank 0 asks for, and keep nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vfl_party.base.seeds import derive_seed
from vfl_party.models import InputSpec, forward
from vfl_party.models.backward import backward
from vfl_party.models.precision import Precision
from vfl_party.ranks.group import Ranks, Word, shares, together
from vfl_party.ranks.leader import synchronised
from vfl_party.ranks.reduce import parallel


def follow(
    ranks: Ranks, make_encoder: Callable[[InputSpec], nn.Module], precision: Precision
) -> None:
    """Computes until rank 0 says END. Raises RankLost if rank 0 ended without it.

    make_encoder: makes the encoder for an input spec, on the CPU; its weights do not matter: each
    batch has rank 0's.
    """
    share: _Share | None = None
    while True:
        with together():
            word, fields = ranks.hear()
            if word is Word.END:
                return
            if word is Word.BEGIN:
                shape, cardinalities = (ranks.numbers((), count) for count in fields[:2])
                spec, share = InputSpec(tuple(shape), tuple(cardinalities)), None
                share = _Share(ranks, make_encoder(spec), spec, precision)
            elif share is not None:
                share.forward(*fields[:4]) if word is Word.FORWARD else share.backward()


class _Share:
    """Computes this rank's rows of each batch."""

    def __init__(
        self, ranks: Ranks, encoder: nn.Module, spec: InputSpec, precision: Precision
    ) -> None:
        self._ranks, self._spec, self._precision = ranks, spec, precision
        self._encoder = synchronised(ranks, encoder.to(ranks.device))
        self._parallel = parallel(self._encoder, ranks.device, ranks.tensors)
        self._z_BD = torch.empty(0)

    def forward(self, rows: int, training: int, learns: int, seed: int) -> None:
        """Embeds this rank's rows of a batch of ``rows`` with rank 0's weights, and sends the
        embeddings to it.
        """
        ranks, encoder = self._ranks, self._encoder
        encoder.train(bool(training))
        if training:
            # So that dropout masks differ between ranks.
            torch.manual_seed(derive_seed(seed, "rank", ranks.rank))
        ranks.spread(encoder)
        inputs = self._receive(shares(rows, ranks.size)[ranks.rank])
        with torch.set_grad_enabled(bool(learns)):
            self._z_BD = forward(
                self._parallel if learns else encoder, *inputs, precision=self._precision
            )
        ranks.send([self._z_BD], [0])

    def backward(self) -> None:
        """Receives the gradient of these embeddings; the gradient of the weights is summed at rank
        0.
        """
        dz_BD = torch.empty_like(self._z_BD)
        self._ranks.receive([dz_BD], [0])
        for parameter in self._encoder.parameters():
            parameter.grad = None
        backward(self._z_BD, dz_BD)

    def _receive(self, rows: int) -> tuple[Tensor, ...]:
        spec, device = self._spec, self._ranks.device
        inputs = [torch.empty(rows, *spec.shape, device=device)]
        if spec.cardinalities:
            inputs.append(
                torch.empty(rows, len(spec.cardinalities), dtype=torch.int64, device=device)
            )
        for x_r in inputs:
            self._ranks.receive([x_r], [0])
        return tuple(inputs)
