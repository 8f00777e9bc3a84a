"""Updates models between two exchanges: on the same batch again (FedBCD), or on a ring of earlier
batches (CELU-VFL). Runs a passive party's round with several batches in flight, batches in parts,
or such updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.batches import Batch
from vfl_party.methods.splitnn.settings import CacheSettings, SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.models import combine
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import backward
from vfl_party.outbound.exchange import Asking
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
        z_BD = self._party.encode(*self._party.rows.need_features().inputs(exchanged.rows))
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
        self._weights, self._sets = party.rows.compute_weights(party.rows.get("train")), sets

    def _add_gradient(self, exchanged: ExchangedBatch, threshold: float | None) -> None:
        party = self._party
        y_B = party.rows.take(party.rows.need_labels()[1], exchanged.rows)
        own_embeddings = party.rows.embed(exchanged.rows)
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
        weights = None if self._weights is None else party.rows.take(self._weights, exchanged.rows)
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


class WeightCopies:
    """Keeps copies of an encoder's parameters, one for each batch in flight, because updates change
    the parameters in place.

    ``last_update``: the change of each parameter in the last update, if weights are predicted.
    """

    def __init__(self, encoder: nn.Module, count: int, *, predicts: bool) -> None:
        self._encoder_parameters: list[Tensor] = list(encoder.parameters())
        number_by_id = {id(parameter): n for n, parameter in enumerate(self._encoder_parameters)}
        self._slots = [
            (module._parameters, name, number_by_id[id(parameter)])
            for module in encoder.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._copies_in_turn = deque(
            [
                parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for parameter in self._encoder_parameters
            ]
            for _ in range(count)
        )
        self.last_update = (
            [torch.zeros_like(parameter) for parameter in self._encoder_parameters]
            if predicts
            else None
        )

    def take(self, ahead: int) -> list[Tensor]:
        """Returns a copy of the current parameters. The copy is overwritten after ``count`` more
        calls.

        ``ahead``: the number of updates that will come before the gradient of the copy is used. If
        weights are predicted, the last update is added this many times.
        """
        copy = self._copies_in_turn[0]
        self._copies_in_turn.rotate(-1)
        with torch.no_grad():
            torch._foreach_copy_(copy, self._encoder_parameters)
            if self.last_update is not None and ahead:
                torch._foreach_add_(copy, self.last_update, alpha=ahead)
        return copy

    @contextmanager
    def track_update(self) -> Iterator[None]:
        """Stores the change of the parameters by the update inside the context in
        ``last_update``.
        """
        change = self.last_update
        if change is None:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(change, self._encoder_parameters)
            yield
            torch._foreach_sub_(change, self._encoder_parameters)
            torch._foreach_neg_(change)

    @contextmanager
    def use(self, weights: list[Tensor]) -> Iterator[None]:
        """Replaces the encoder's parameters by a copy inside the context. ``functional_call`` would
        take ten times as long.
        """
        self._set_parameters(weights)
        try:
            yield
        finally:
            self._set_parameters(self._encoder_parameters)

    def _set_parameters(self, weights: Sequence[Tensor]) -> None:
        for parameters, name, n in self._slots:
            parameters[name] = weights[n]  # type: ignore[assignment]

    def move_gradient(self, weights: list[Tensor]) -> None:
        """Moves the gradient of a copy to the parameters. Raises InputError if these already have a
        gradient, because then the encoder did not use the copy.
        """
        for parameter, copy in zip(self._encoder_parameters, weights, strict=True):
            if parameter.grad is not None:
                raise InputError(
                    Code.MODEL_INVALID,
                    "in_flight: the encoder uses parameters that are not registered as parameters "
                    "of a module. Set in_flight = 1, or correct the encoder.",
                )
            parameter.grad, copy.grad = copy.grad, None


@dataclass(frozen=True)
class _BatchInFlight:
    """A batch in flight: its embeddings, one tensor per part, and the copied weights that computed
    these; None without copies.
    """

    batch: Batch
    z: list[Tensor]
    weights: list[Tensor] | None


class Pipe:
    """Runs the rounds of a passive party, as decision 0025 defines them.

    The embeddings of batch t are computed with the weights after max(0, t - D + 1) updates of the
    round. The batch's gradient is the product of the Jacobian at these weights and the received dz.
    Update t applies this gradient to the weights after t updates. No batch is in flight at the end
    of a round.
    """

    def __init__(
        self,
        party: Party,
        name: str,
        settings: SplitNNSettings,
        training: OwnTraining,
        embedding: Asking,
    ) -> None:
        self._party, self._name, self._training, self._embedding = party, name, training, embedding
        self._in_flight = settings.in_flight
        self._local = PassiveLocalUpdates(party, settings, training) if settings.local else None
        self._copies: WeightCopies | None = None
        self._predicts = settings.predict_weights
        # The last update from a checkpoint, until the copies exist.
        self._last_update: list[Tensor] | None = None

    def run(self, round_: int, rounds: int) -> tuple[int, int]:
        """Runs the steps of a round. Returns the number of steps and the number of exchanges."""
        party, training = self._party, self._training
        batches = training.batches.plan(round_)
        # The copies are made here, because the models may not be on the party's device earlier.
        if self._in_flight > 1 and self._copies is None:
            self._copies = WeightCopies(
                party.models["encoder"], self._in_flight, predicts=self._predicts
            )
            if self._copies.last_update is not None and self._last_update is not None:
                torch._foreach_copy_(self._copies.last_update, self._last_update)
        under_way: deque[_BatchInFlight] = deque()
        to_send = iter(batches)
        for batch, planned in enumerate(batches):
            while (
                len(under_way) < self._in_flight and (following := next(to_send, None)) is not None
            ):
                under_way.append(self._send(round_, following, len(under_way)))
            self._update(round_, under_way.popleft())
            if planned.last:
                training.end_epoch()
            party.hooks.tick(self._name, round_, rounds, batch + 1, len(batches))
        return len(batches), sum(len(planned_batch.parts) for planned_batch in batches)

    def _send(self, round_: int, batch: Batch, ahead: int) -> _BatchInFlight:
        """Sends a batch's embeddings, each part as soon as it is computed. ``ahead``: the number of
        batches in flight before this one.
        """
        party, training = self._party, self._training
        copies, weights = self._copies, None
        if copies is not None:
            weights = copies.take(ahead)
        in_flight = _BatchInFlight(batch, [], weights)
        for number, rows in _list_held_parts(batch):
            inputs = training.inputs(rows, round_, number)
            with (
                copies.use(weights) if copies is not None and weights is not None else nullcontext()
            ):
                z_BD = party.encode(*inputs)
            self._embedding.send(StepKey(self._name, round_, number), {"z": z_BD}, rows)
            in_flight.z.append(z_BD)
        return in_flight

    def _update(self, round_: int, in_flight: _BatchInFlight) -> None:
        """Waits for the gradients of the oldest batch, and updates the encoder."""
        batch, training, dz_BD = in_flight.batch, self._training, []
        training.zero_grad()
        for (number, _), z in zip(_list_held_parts(batch), in_flight.z, strict=True):
            reply = self._embedding.receive(StepKey(self._name, round_, number), rows=len(z))
            dz_BD.append(reply["dz"])
            backward(z, reply["dz"])
        if self._copies is not None and in_flight.weights is not None:
            self._copies.move_gradient(in_flight.weights)
        if not in_flight.z:
            return
        with self._copies.track_update() if self._copies is not None else nullcontext():
            training.step()
        if self._local is not None:
            own_name = self._party.name
            parts_and_tensors = zip(batch.parts, in_flight.z, dz_BD, strict=True)
            parts = [
                ExchangedBatch(rows, {own_name: z}, {own_name: dz})
                for rows, z, dz in parts_and_tensors
            ]
            self._local.update(batch.rows, parts)

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        tree = {} if self._local is None else self._local.state()
        last = self._last_update if self._copies is None else self._copies.last_update
        return tree | (
            {}
            if last is None
            else {"last_update": {str(n): tensor for n, tensor in enumerate(last)}}
        )

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        if self._local is not None:
            self._local.load_state(tree)
        if self._predicts and "last_update" in tree:
            self._last_update = [
                tree["last_update"][str(n)] for n in range(len(tree["last_update"]))
            ]
            if self._copies is not None and self._copies.last_update is not None:
                torch._foreach_copy_(self._copies.last_update, self._last_update)


def _list_held_parts(batch: Batch) -> list[tuple[int, Rows]]:
    """Returns the parts of a batch in which this party holds rows, with the numbers of their
    exchanges.
    """
    return [(number, rows) for number, rows in enumerate(batch.parts, batch.first) if len(rows)]
