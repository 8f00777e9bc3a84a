"""Takes the private steps of one phase at one party: DP-SGD that stops when the run's budget is
spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vfl_common.errors import InternalError
from vfl_party.base.seeds import Rows
from vfl_party.privacy import poisson
from vfl_party.privacy.dpsgd import DpTraining, check_model
from vfl_party.privacy.plan import PrivacyPlan


class PrivateSteps:
    """The steps; made with their phase, so that an unsuitable model is refused early. ``begin``
    comes later.

    Between ``begin`` (or ``load_state``) and ``close`` the module has opacus's hooks, for one phase
    at a time. ``note``: why training stopped; empty before that.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        phase: str,
        party: str,
        module: nn.Module,
        optimizer: Optimizer,
        rows: Rows,
        batch_size: int,
        max_grad_norm: float,
    ) -> None:
        check_model(module)
        self._budget = plan.budget(phase, party)
        self._spent = partial(plan.epsilon_after, phase, party)
        self._spends = partial(plan.spends, phase)
        noise = self._budget.own.noise_multiplier
        self._make = partial(
            DpTraining,
            module,
            optimizer,
            rows,
            batch_size,
            noise_multiplier=noise,
            max_grad_norm=max_grad_norm,
        )
        self._training: DpTraining | None = None
        self.batches_an_epoch = poisson.steps_an_epoch(len(rows), batch_size)
        self.note = ""

    def begin(self) -> DpTraining:
        """Draws the keys of samples and noise, unless that is done. From now on they are part of
        ``state``.
        """
        if self._training is None:
            self._training = self._make()
        return self._training

    @property
    def epsilon(self) -> float:
        """The joint ε of all parties: this party's steps so far, and all planned steps of the
        others.
        """
        return self._spent(self.begin().spending.steps)

    def batches(self, epoch: int) -> Iterator[Rows]:
        """Yields the batches of an epoch, one for each step, until the next step would exceed the
        budget. Each is recorded before it is taken, and so counts even if the process ends in it.
        """
        training = self.begin()
        for batch in training.batches(epoch):
            done = training.spending.steps
            if not self._budget.may_step(done):
                self.note = self._budget.note(done)
                return
            taken = replace(training.spending, steps=done + 1)
            self._spends(taken, training.of)
            yield batch

    def step(self, rows: Rows, loss: Callable[[Rows], Tensor]) -> Tensor | None:
        """Takes a step: see ``DpTraining.step``."""
        if self._training is None:
            raise InternalError("a private step outside of its phase")
        return self._training.step(rows, loss)

    def close(self) -> None:
        """Ends the private training: the module trains normally again."""
        if self._training is not None:
            self._training.close()
            self._training = None

    def state(self) -> dict[str, Any]:
        """Returns the state, with the party's secrets: see ``DpTraining.state``."""
        return self.begin().state()

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self.begin().load_state(tree)
