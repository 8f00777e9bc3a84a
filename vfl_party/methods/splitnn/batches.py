"""The batches of a phase of split training: the same at every party, and known before it begins."""

from __future__ import annotations

from itertools import accumulate

from vfl_common.errors import Code, InputError
from vfl_party.context import Party
from vfl_party.methods.splitnn.exchanges import embedding
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.seeds import Rows, batches


class Batches:
    """Computes the epochs and rounds of the phase. Raises InputError if there are no rows to train on."""

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        rows = len(party.rows("train"))
        if rows == 0:
            raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {phase}: there are no labelled training rows")
        if settings.max_bytes is not None and not party.recipe.passives:
            text = f"recipe: phases: {phase}: max_bytes: {party.name} is alone, so no bytes cross"
            raise InputError(Code.CONFIG_INVALID, f"{text}; remove it, or add a passive party")
        swap = embedding(settings)
        chains, sizes = party.chains(phase, swap), {"rows": 1, "width": party.embedding_size}
        crosses = [chains.up.wire_spec(swap.up.spec(**sizes)), chains.down.wire_spec(swap.down.spec(**sizes))]
        row_bytes = sum(spec.payload_bytes for spec in crosses) * len(party.recipe.passives)
        self._sizes = [len(batch) for batch in self._epoch(0)]  # the same in every epoch
        self._bytes = [row_bytes * size for size in self._sizes]
        self.epochs = settings.epochs_over(rows)
        if settings.max_bytes is not None:
            self.epochs = min(self.epochs, -(-settings.max_bytes // max(1, sum(self._bytes))))
        self.rounds = -(-self.epochs // settings.validate_every)

    def of(self, round_: int) -> list[list[Rows]]:
        """Returns the epochs of a round, each as its batches."""
        return [self._epoch(epoch)[: self._count(epoch)] for epoch in self._epochs(round_)]

    def sizes(self, round_: int) -> list[int]:
        """Returns the number of rows of each batch of a round, in order."""
        return [size for epoch in self._epochs(round_) for size in self._sizes[: self._count(epoch)]]

    def _epochs(self, round_: int) -> range:
        begin = round_ * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def _count(self, epoch: int) -> int:
        """Returns how many batches of an epoch begin before ``max_bytes`` have crossed."""
        most = self._settings.max_bytes
        if most is None:
            return len(self._sizes)
        before = accumulate(self._bytes, initial=epoch * sum(self._bytes))
        return sum(sent < most for sent, _ in zip(before, self._bytes, strict=False))

    def _epoch(self, epoch: int) -> list[Rows]:
        rows = self._party.rows("train")
        return batches(self._party.recipe.seed, self._phase, epoch, rows, self._settings.batch_size)


def numbered(epochs: list[list[Rows]]) -> list[tuple[Rows, bool]]:
    """Returns the batches of some epochs in order, each with whether it is its epoch's last."""
    return [(rows, batch + 1 == len(epoch)) for epoch in epochs for batch, rows in enumerate(epoch)]
