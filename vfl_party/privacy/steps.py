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
    """Takes the private steps of one phase at one party: DP-SGD within the run's budget.

    Creating the object checks the model, so that an unsuitable model is refused early. Between
    ``begin`` (or ``load_state``) and ``close`` the module has the hooks of opacus, for one phase at
    a time. ``note`` says why training stopped; it is empty before that.
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
        self._budget = plan.get_budget(phase, party)
        self._compute_epsilon_after = partial(plan.epsilon_after, phase, party)
        self._record_step = partial(plan.spends, phase)
        noise = self._budget.own_spending.noise_multiplier
        self._make_training = partial(
            DpTraining,
            module,
            optimizer,
            rows,
            batch_size,
            noise_multiplier=noise,
            max_grad_norm=max_grad_norm,
        )
        self._training: DpTraining | None = None
        self.batches_an_epoch = poisson.count_steps_per_epoch(len(rows), batch_size)
        self.note = ""

    def begin(self) -> DpTraining:
        """Starts the private training, unless it has started: draws the secret keys of samples and
        noise. From now on ``state`` contains them.
        """
        if self._training is None:
            self._training = self._make_training()
        return self._training

    @property
    def epsilon(self) -> float:
        """The joint ε of this party's steps so far and all planned steps of the other parties."""
        return self._compute_epsilon_after(self.begin().spending.steps)

    def batches(self, epoch: int) -> Iterator[Rows]:
        """Yields the batches of an epoch, one for each step, until the next step would exceed the
        budget. A step is recorded before its batch is yielded, so it counts even if the process
        ends during the step.
        """
        training = self.begin()
        for batch in training.batches(epoch):
            steps_done = training.spending.steps
            if not self._budget.may_step(steps_done):
                self.note = self._budget.explain_stop(steps_done)
                return
            spending_after = replace(training.spending, steps=steps_done + 1)
            self._record_step(spending_after, training.keys_digest)
            yield batch

    def step(self, rows: Rows, loss: Callable[[Rows], Tensor]) -> Tensor | None:
        """Updates the module once on a batch; see ``DpTraining.step``."""
        if self._training is None:
            raise InternalError("call begin() before a private step")
        return self._training.step(rows, loss)

    def close(self) -> None:
        """Ends the private training. Afterwards the module trains normally."""
        if self._training is not None:
            self._training.close()
            self._training = None

    def state(self) -> dict[str, Any]:
        """Returns the state of the training, which contains the party's secrets; see
        ``DpTraining.state``.
        """
        return self.begin().state()

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores the state that ``state`` returned."""
        self.begin().load_state(tree)
