"""Updates between two exchanges: on the same batch again (FedBCD), or on a ring of earlier batches
(CELU-VFL).
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
from vfl_party.models.backward import backward
from vfl_party.models.metrics import loss_fn
from vfl_party.phases.context import Party
from vfl_party.phases.sets import Sets, sum_losses


@dataclass(frozen=True)
class Swapped:
    """An exchange of a batch that has ended: rows, {party: its embeddings}, {party: their
    gradients}, [B, D] each; at the active party also the batch's round and number.
    """

    rows: Rows
    z: Mapping[str, Tensor]
    dz: Mapping[str, Tensor]
    place: tuple[int, ...] = ()


class ExchangeRing:
    """The last W exchanges. Exchange t is in slot t mod W; local update j uses slot j mod W.

    R local updates follow each exchange, so each exchange is used R times, at equal distances,
    before another one takes its slot. An empty slot is skipped.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._size, self._uses = settings.batches, settings.uses
        self._slots: dict[int, Swapped] = {}
        self._exchanges = 0

    def put(self, swapped: Swapped) -> list[Swapped]:
        """Adds an exchange; returns those to use now, in order."""
        self._slots[self._exchanges % self._size] = swapped
        first, self._exchanges = self._exchanges * self._uses, self._exchanges + 1
        ticks = range(first, first + self._uses)
        return [
            self._slots[tick % self._size] for tick in ticks if tick % self._size in self._slots
        ]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        slots = {
            str(slot): {
                "rows": torch.from_numpy(swapped.rows),
                "z": dict(swapped.z),
                "dz": dict(swapped.dz),
                "place": list(swapped.place),
            }
            for slot, swapped in self._slots.items()
        }
        return {"exchanges": self._exchanges, "slots": slots}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._exchanges = tree["exchanges"]
        self._slots = {
            int(slot): Swapped(
                slot_tree["rows"].cpu().numpy(),
                slot_tree["z"],
                slot_tree["dz"],
                tuple(slot_tree["place"]),
            )
            for slot, slot_tree in tree["slots"].items()
        }


class LocalUpdates(ABC):
    """The updates without an exchange, on one side."""

    def __init__(self, party: Party, settings: SplitNNSettings, training: OwnTraining) -> None:
        self._party, self._training, self._settings = party, training, settings
        self._ring = ExchangeRing(settings.cache) if settings.cache is not None else None

    def update(self, rows: Rows, parts: Sequence[Swapped]) -> None:
        """Makes the updates that follow the exchange of a batch, which had these parts."""
        swapped = Swapped(
            rows,
            {name: z.detach() for name, z in _join([part.z for part in parts]).items()},
            _join([part.dz for part in parts]),
            parts[0].place,
        )
        if self._ring is None:
            for _ in range(self._settings.local_updates - 1):
                self._again(swapped, None)
            return
        assert self._settings.cache is not None  # noqa: S101 - there is a ring
        for earlier in self._ring.put(swapped):
            self._again(earlier, self._settings.cache.threshold)

    def _again(self, swapped: Swapped, threshold: float | None) -> None:
        self._training.zero_grad()
        self._gradient(swapped, threshold)
        self._training.step()

    @abstractmethod
    def _gradient(self, swapped: Swapped, threshold: float | None) -> None:
        """Adds the gradient of an exchange, with rows weighted if there is a ``threshold``, to the
        parameters'.
        """

    def state(self) -> dict[str, Any]:
        return {} if self._ring is None else {"ring": self._ring.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        if self._ring is not None:
            self._ring.load_state(tree["ring"])


class PassiveLocalUpdates(LocalUpdates):
    """The passive side: updates its encoder with the stored gradient. Row weights compare present
    with stored embeddings.
    """

    def _gradient(self, swapped: Swapped, threshold: float | None) -> None:
        z_BD = self._party.encode(*self._party.need_features().inputs(swapped.rows))
        (dz_BD,) = swapped.dz.values()
        if threshold is not None:
            (stale_BD,) = swapped.z.values()
            dz_BD = row_weights(z_BD.detach(), stale_BD, threshold) * dz_BD
        backward(z_BD, dz_BD)


class ActiveLocalUpdates(LocalUpdates):
    """The active side: computes the loss with the stored embeddings. Row weights compare present
    with stored gradients.
    """

    def __init__(
        self, party: Party, settings: SplitNNSettings, training: OwnTraining, sets: Sets
    ) -> None:
        super().__init__(party, settings, training)
        self._weights, self._sets = party.row_weights(party.rows("train")), sets

    def _gradient(self, swapped: Swapped, threshold: float | None) -> None:
        party = self._party
        y_B = party.take(party.need_labels()[1], swapped.rows)
        own = party.own_embeddings(swapped.rows)
        others = {name: z.detach() for name, z in swapped.z.items()}
        sets = self._sets.draw(others, *swapped.place)
        rule, z_BD = party.recipe.model.combine, [*others.values()]
        if threshold is not None:
            for z in z_BD:
                z.requires_grad_()
        combined = [
            combine(rule, embeddings)
            for embeddings in self._sets.embeddings(sets, own, others) or [[*own, *z_BD]]
        ]
        outputs = [party.outputs(value) for value in combined]
        loss_of = loss_fn(party.recipe.task)
        weights = None if self._weights is None else party.take(self._weights, swapped.rows)
        loss = sum_losses([loss_of(output, y_B, weights) for output in outputs], sets)
        if threshold is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        # The loss is a sum over rows: to weight a row's loss is to weight its row of this gradient.
        of_outputs = torch.autograd.grad(loss, outputs)
        now = torch.autograd.grad(
            outputs, z_BD, of_outputs, retain_graph=True, materialize_grads=True
        )
        w_B1 = row_weights(
            torch.cat(now, dim=1), torch.cat(list(swapped.dz.values()), dim=1), threshold
        )
        backward(torch.cat(outputs), torch.cat([w_B1 * gradient for gradient in of_outputs]))


def _join(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Returns {party: its rows of all parts}."""
    first, *others = parts
    if not others:
        return first
    return {name: torch.cat([part[name] for part in parts]) for name in first}


def row_weights(now_BD: Tensor, stale_BD: Tensor, threshold: float) -> Tensor:
    """Returns each row's weight, float32 [B, 1]: the cosine of its two vectors, 0 if it is below
    ``threshold``.

    It is also 0 if a vector is zero. Computed in float64, because squares of small gradients vanish
    in float32.
    """
    a_BD, b_BD = now_BD.double(), stale_BD.double()
    norms_B = a_BD.norm(dim=1) * b_BD.norm(dim=1)
    cosine_B = (a_BD * b_BD).sum(dim=1) / norms_B.clamp_min(torch.finfo(torch.float64).tiny)
    kept_B = (norms_B > 0) & (cosine_B >= threshold)
    return torch.where(kept_B, cosine_B, 0.0).to(now_BD.dtype)[:, None]
