"""The passive side's round with several batches in flight, batches in parts, or updates between
exchanges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.batches import Batch
from vfl_party.methods.splitnn.local import PassiveLocalUpdates, Swapped
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.models.backward import backward
from vfl_party.outbound.exchange import Asking
from vfl_party.phases.context import Party


class WeightCopies:
    """Copies of an encoder's parameters, one for each batch in flight, because updates change the
    parameters in place.

    ``last_update``: what the last update has added to each parameter, if weights are predicted.
    """

    def __init__(self, encoder: nn.Module, count: int, *, predicts: bool) -> None:
        self._own: list[Tensor] = list(encoder.parameters())
        place = {id(parameter): n for n, parameter in enumerate(self._own)}
        self._slots = [
            (module._parameters, name, place[id(parameter)])
            for module in encoder.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._free = deque(
            [
                parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for parameter in self._own
            ]
            for _ in range(count)
        )
        self.last_update = (
            [torch.zeros_like(parameter) for parameter in self._own] if predicts else None
        )

    def take(self, ahead: int) -> list[Tensor]:
        """Returns a copy of the present parameters, which is overwritten after ``count`` more
        calls.

        ``ahead``: the number of updates before the one that uses the copy. If weights are
        predicted, the last update is added this many times.
        """
        copy = self._free[0]
        self._free.rotate(-1)
        with torch.no_grad():
            torch._foreach_copy_(copy, self._own)
            if self.last_update is not None and ahead:
                torch._foreach_add_(copy, self.last_update, alpha=ahead)
        return copy

    @contextmanager
    def track_update(self) -> Iterator[None]:
        """Records what the update inside the context adds to the parameters."""
        last = self.last_update
        if last is None:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(last, self._own)
            yield
            torch._foreach_sub_(last, self._own)
            torch._foreach_neg_(last)

    @contextmanager
    def use(self, weights: list[Tensor]) -> Iterator[None]:
        """Replaces the encoder's parameters by a copy. ``functional_call`` takes ten times as
        long.
        """
        self._put(weights)
        try:
            yield
        finally:
            self._put(self._own)

    def _put(self, weights: Sequence[Tensor]) -> None:
        for parameters, name, n in self._slots:
            parameters[name] = weights[n]  # type: ignore[assignment]

    def move_gradient(self, weights: list[Tensor]) -> None:
        """Moves the gradient of a copy to the parameters. Raises InputError if they have a gradient
        already, because the copy was not used.
        """
        for own, copy in zip(self._own, weights, strict=True):
            if own.grad is not None:
                raise InputError(
                    Code.MODEL_INVALID,
                    "in_flight: the encoder uses parameters that are not registered as parameters "
                    "of a module. Set in_flight = 1, or correct the encoder.",
                )
            own.grad, copy.grad = copy.grad, None


@dataclass(frozen=True)
class _Sent:
    """A batch in flight: its embeddings, one tensor per part, and the weights that computed them,
    if they are copies.
    """

    batch: Batch
    z: list[Tensor]
    weights: list[Tensor] | None


class Pipe:
    """Runs rounds as decision 0025 defines them.

    Batch t is embedded with the weights after max(0, t - D + 1) updates of the round. Its gradient
    is the product of the Jacobian at these weights and the dz that came; update t applies it to the
    weights after t updates. The pipe is empty at the end of a round.
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
        # The last update of a checkpoint, until the copies exist.
        self._last_update: list[Tensor] | None = None

    def run(self, round_: int, rounds: int) -> tuple[int, int]:
        """Runs a round's steps; returns their number, and that of their exchanges."""
        party, training = self._party, self._training
        batches = training.batches.plan(round_)
        # Created here, because only now the models are certainly on the party's device.
        if self._in_flight > 1 and self._copies is None:
            self._copies = WeightCopies(
                party.models["encoder"], self._in_flight, predicts=self._predicts
            )
            if self._copies.last_update is not None and self._last_update is not None:
                torch._foreach_copy_(self._copies.last_update, self._last_update)
        under_way: deque[_Sent] = deque()
        to_send = iter(batches)
        for batch, planned in enumerate(batches):
            while (
                len(under_way) < self._in_flight and (following := next(to_send, None)) is not None
            ):
                under_way.append(self._send(round_, following, len(under_way)))
            self._update(round_, under_way.popleft())
            if planned.last:
                training.end_epoch()
            party.tick(self._name, round_, rounds, batch + 1, len(batches))
        return len(batches), sum(len(planned_batch.parts) for planned_batch in batches)

    def _send(self, round_: int, batch: Batch, ahead: int) -> _Sent:
        """Sends a batch's embeddings, each part as soon as it is computed; ``ahead``: batches that
        are under way.
        """
        party, training = self._party, self._training
        copies, weights = self._copies, None
        if copies is not None:
            weights = copies.take(ahead)
        sent = _Sent(batch, [], weights)
        for number, rows in _parts_here(batch):
            inputs = training.inputs(rows, round_, number)
            with (
                copies.use(weights) if copies is not None and weights is not None else nullcontext()
            ):
                z_BD = party.encode(*inputs)
            self._embedding.send(StepKey(self._name, round_, number), {"z": z_BD}, rows)
            sent.z.append(z_BD)
        return sent

    def _update(self, round_: int, sent: _Sent) -> None:
        """Waits for the gradients of the oldest batch, and updates the encoder."""
        batch, training, dz_BD = sent.batch, self._training, []
        training.zero_grad()
        for (number, _), z in zip(_parts_here(batch), sent.z, strict=True):
            reply = self._embedding.receive(StepKey(self._name, round_, number), rows=len(z))
            dz_BD.append(reply["dz"])
            backward(z, reply["dz"])
        if self._copies is not None and sent.weights is not None:
            self._copies.move_gradient(sent.weights)
        if not sent.z:
            return
        with self._copies.track_update() if self._copies is not None else nullcontext():
            training.step()
        if self._local is not None:
            me = self._party.name
            swaps = zip(batch.parts, sent.z, dz_BD, strict=True)
            parts = [Swapped(rows, {me: z}, {me: dz}) for rows, z, dz in swaps]
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


def _parts_here(batch: Batch) -> list[tuple[int, Rows]]:
    """Returns the parts of a batch of which this party holds rows, with the numbers of their
    exchanges.
    """
    return [(number, rows) for number, rows in enumerate(batch.parts, batch.first) if len(rows)]
