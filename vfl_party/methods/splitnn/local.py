"""Updates models between two exchanges: on the same batch again (FedBCD), or on a ring of earlier
batches (CELU-VFL).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.settings import CacheSettings, SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.models import combine
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import backward
from vfl_party.phases.context import Party
from vfl_party.phases.sets import Sets, sum_losses


@dataclass(frozen=True)
class ExchangedBatch:
    """A batch whose exchange has ended.

    ``rows``: its rows. ``z``, ``dz``: {party: embeddings [B, D]} and {party: their gradients [B,
    D]}. ``place``: the batch's round and number, only at the active party.
    """

    rows: Rows
    z: Mapping[str, Tensor]
    dz: Mapping[str, Tensor]
    place: tuple[int, ...] = ()


class ExchangeRing:
    """Stores the last W exchanges. Exchange t is in slot t mod W, and local update j uses slot j
    mod W.

    R local updates follow each exchange. So each exchange is used R times, at equal distances,
    before a later exchange replaces it. An empty slot is skipped.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._size, self._uses = settings.batches, settings.uses
        self._slots: dict[int, ExchangedBatch] = {}
        self._num_exchanges = 0

    def put(self, exchanged: ExchangedBatch) -> list[ExchangedBatch]:
        """Adds an exchange. Returns the exchanges for the next local updates, in order."""
        self._slots[self._num_exchanges % self._size] = exchanged
        first_update, self._num_exchanges = (
            self._num_exchanges * self._uses,
            self._num_exchanges + 1,
        )
        updates = range(first_update, first_update + self._uses)
        return [
            self._slots[update % self._size]
            for update in updates
            if update % self._size in self._slots
        ]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        slots = {
            str(slot): {
                "rows": torch.from_numpy(exchanged.rows),
                "z": dict(exchanged.z),
                "dz": dict(exchanged.dz),
                "place": list(exchanged.place),
            }
            for slot, exchanged in self._slots.items()
        }
        return {"exchanges": self._num_exchanges, "slots": slots}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._num_exchanges = tree["exchanges"]
        self._slots = {
            int(slot): ExchangedBatch(
                slot_tree["rows"].cpu().numpy(),
                slot_tree["z"],
                slot_tree["dz"],
                tuple(slot_tree["place"]),
            )
            for slot, slot_tree in tree["slots"].items()
        }


class LocalUpdates(ABC):
    """Base class of both sides. Makes updates without an exchange."""

    def __init__(self, party: Party, settings: SplitNNSettings, training: OwnTraining) -> None:
        self._party, self._training, self._settings = party, training, settings
        self._ring = ExchangeRing(settings.cache) if settings.cache is not None else None

    def update(self, rows: Rows, parts: Sequence[ExchangedBatch]) -> None:
        """Makes the updates that follow the exchange of a batch. ``parts``: the exchanged parts of
        the batch.
        """
        exchanged = ExchangedBatch(
            rows,
            {name: z.detach() for name, z in _concatenate([part.z for part in parts]).items()},
            _concatenate([part.dz for part in parts]),
            parts[0].place,
        )
        if self._ring is None:
            for _ in range(self._settings.local_updates - 1):
                self._update_once(exchanged, None)
            return
        assert self._settings.cache is not None  # noqa: S101 - there is a ring
        for earlier in self._ring.put(exchanged):
            self._update_once(earlier, self._settings.cache.threshold)

    def _update_once(self, exchanged: ExchangedBatch, threshold: float | None) -> None:
        self._training.zero_grad()
        self._add_gradient(exchanged, threshold)
        self._training.step()

    @abstractmethod
    def _add_gradient(self, exchanged: ExchangedBatch, threshold: float | None) -> None:
        """Adds the gradient of an exchanged batch to the parameters' gradients. With a
        ``threshold``, rows are weighted.
        """

    def state(self) -> dict[str, Any]:
        return {} if self._ring is None else {"ring": self._ring.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        if self._ring is not None:
            self._ring.load_state(tree["ring"])


class PassiveLocalUpdates(LocalUpdates):
    """A passive party's side: updates its encoder with the stored gradient. Row weights compare
    current with stored embeddings.
    """

    def _add_gradient(self, exchanged: ExchangedBatch, threshold: float | None) -> None:
        z_BD = self._party.encode(*self._party.need_features().inputs(exchanged.rows))
        (dz_BD,) = exchanged.dz.values()
        if threshold is not None:
            (stale_BD,) = exchanged.z.values()
            dz_BD = compute_row_weights(z_BD.detach(), stale_BD, threshold) * dz_BD
        backward(z_BD, dz_BD)


class ActiveLocalUpdates(LocalUpdates):
    """The active party's side: computes the loss with the stored embeddings. Row weights compare
    current with stored gradients.
    """

    def __init__(
        self, party: Party, settings: SplitNNSettings, training: OwnTraining, sets: Sets
    ) -> None:
        super().__init__(party, settings, training)
        self._weights, self._sets = party.row_weights(party.rows("train")), sets

    def _add_gradient(self, exchanged: ExchangedBatch, threshold: float | None) -> None:
        party = self._party
        y_B = party.take(party.need_labels()[1], exchanged.rows)
        own_embeddings = party.own_embeddings(exchanged.rows)
        stored_BD = {name: z.detach() for name, z in exchanged.z.items()}
        sets = self._sets.draw(stored_BD, *exchanged.place)
        rule, z_BD = party.recipe.model.combine, [*stored_BD.values()]
        if threshold is not None:
            for z in z_BD:
                z.requires_grad_()
        combined = [
            combine(rule, embeddings)
            for embeddings in self._sets.embeddings(sets, own_embeddings, stored_BD)
            or [[*own_embeddings, *z_BD]]
        ]
        outputs = [party.outputs(value) for value in combined]
        loss_function = loss_fn(party.recipe.task)
        weights = None if self._weights is None else party.take(self._weights, exchanged.rows)
        loss = sum_losses([loss_function(output, y_B, weights) for output in outputs], sets)
        if threshold is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        # The loss is a sum over rows, so a weight for a row's loss is a weight for the row of this
        # gradient.
        output_gradients = torch.autograd.grad(loss, outputs)
        current_gradients = torch.autograd.grad(
            outputs, z_BD, output_gradients, retain_graph=True, materialize_grads=True
        )
        w_B1 = compute_row_weights(
            torch.cat(current_gradients, dim=1),
            torch.cat(list(exchanged.dz.values()), dim=1),
            threshold,
        )
        backward(torch.cat(outputs), torch.cat([w_B1 * gradient for gradient in output_gradients]))


def _concatenate(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Returns {party: the concatenation of its tensors over all parts}."""
    first_part, *other_parts = parts
    if not other_parts:
        return first_part
    return {name: torch.cat([part[name] for part in parts]) for name in first_part}


def compute_row_weights(current_BD: Tensor, stale_BD: Tensor, threshold: float) -> Tensor:
    """Returns the weight of each row, float32 [B, 1]: the cosine of its current and stored vectors,
    or 0 if the cosine is below ``threshold``.

    The weight is also 0 if a vector is zero. It is computed in float64, because squares of small
    gradients underflow in float32.
    """
    a_BD, b_BD = current_BD.double(), stale_BD.double()
    norms_B = a_BD.norm(dim=1) * b_BD.norm(dim=1)
    cosine_B = (a_BD * b_BD).sum(dim=1) / norms_B.clamp_min(torch.finfo(torch.float64).tiny)
    kept_B = (norms_B > 0) & (cosine_B >= threshold)
    return torch.where(kept_B, cosine_B, 0.0).to(current_BD.dtype)[:, None]
