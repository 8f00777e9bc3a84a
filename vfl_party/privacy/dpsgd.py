"""Trains one party's own models by DP-SGD (Abadi et al. 2016; FedOnce, Algorithm 1, lines 11 to 13
and 26 to 28).

dp = DpTraining(module, optimizer, rows, batch_size, noise_multiplier=1.1, max_grad_norm=1.0)
for batch in dp.batches(epoch):
    dp.step(batch, lambda rows: loss(module(x[rows]), y[rows]))
dp.close()
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.seeds import Rows
from vfl_party.outbound.filter import PrivateGaussian
from vfl_party.privacy.accountant import Spending
from vfl_party.privacy.plan import (
    PrivacyPlan,
    compute_sampling_rate,
    count_steps_per_epoch,
    draw_batches,
)


def check_model(module: nn.Module) -> None:
    """Raises InputError (MODEL_INVALID) if a row's output depends on other rows, or if opacus
    cannot compute the gradient of each row.
    """
    if any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise InputError(
            Code.MODEL_INVALID,
            "differential privacy: the model has BatchNorm, which makes a row's output depend on "
            "other rows. Set batch_norm = false, or use GroupNorm in your own encoder.",
        )
    from vfl_party.privacy.private_optimizer import GradSampleHooks, ModuleValidator

    problems = [*ModuleValidator.validate(module), *GradSampleHooks.validate(module)]
    messages = [text for text in map(str, problems) if "training mode" not in text]
    if messages:
        raise InputError(
            Code.MODEL_INVALID,
            f"differential privacy: cannot train this model ({messages[0].strip()}). Change the "
            "layer, or remove dp.",
        )


class DpTraining:
    """Trains a module on Poisson batches: clips the gradient of each row and adds noise to the sum.

    Args:
        module: The model, or several models in an ``nn.ModuleDict``. The names in its state do not
            change.
        optimizer: The optimizer of all trainable parameters of the module.
        rows: The row numbers to sample from.
        batch_size: The mean size of a batch. Gradients are divided by this mean, not by the size of
            the batch.
        noise_multiplier: σ. The standard deviation of the noise is σ * max_grad_norm.
        max_grad_norm: The maximum L2 norm of one row's gradient, over all parameters.

    Samples and noise come from secret random generators, so two runs of one recipe differ. The
    first use imports opacus, which takes about 1.6 s of CPU time and 110 MB.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        rows: Rows,
        batch_size: int,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
    ) -> None:
        from vfl_party.privacy.private_optimizer import GradSampleHooks, PrivateOptimizer

        check_model(module)
        self._params = [p for p in module.parameters() if p.requires_grad]
        optimized = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if {id(p) for p in optimized} != {id(p) for p in self._params}:
            raise InternalError(
                "the optimizer must have exactly the trainable parameters of the module"
            )
        self._module, self._rows, self._batch_size = module, rows, batch_size
        self._rate = compute_sampling_rate(len(rows), batch_size)
        self._noise, self._key, self._steps = PrivateGaussian(), secrets.randbits(128), 0
        self._hooks = GradSampleHooks(module, loss_reduction="mean")
        self._hooks.disable_hooks()
        self._optimizer = PrivateOptimizer(
            optimizer,
            self._noise,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=self._rate * len(rows),
        )

    @property
    def spending(self) -> Spending:
        """The spending of this party so far."""
        return Spending(self._optimizer.noise_multiplier, self._rate, self._steps)

    @property
    def keys_digest(self) -> str:
        """A digest that identifies the secret keys of samples and noise without revealing them."""
        key = self._key.to_bytes(16, "little")
        return blake2b(b"of", key=key, digest_size=8).hexdigest()

    def batches(self, epoch: int) -> list[Rows]:
        """Returns the row numbers of each step of an epoch; a batch may be empty."""
        return draw_batches(self._key, epoch, self._rows, self._batch_size)

    def step(self, rows: Rows, loss: Callable[[Rows], Tensor]) -> Tensor | None:
        """Updates the module once, in training mode. An empty batch is a step with noise only.

        loss: Returns the mean loss of these rows, computed through the module. The loss of a row
        must not depend on other rows. Not called for an empty batch.

        Returns the mean loss, or None for an empty batch. It has no noise, so it reveals something
        of the training rows.
        """
        value = None
        if len(rows):
            value = self._compute_row_gradients(rows, loss)
        else:
            for p in self._params:
                p.grad_sample = p.new_zeros((0, *p.shape))  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return value

    def _compute_row_gradients(self, rows: Rows, loss: Callable[[Rows], Tensor]) -> Tensor:
        """Computes the gradient of each row, [B, …], into ``grad_sample`` of every parameter."""
        self._hooks.enable_hooks()
        try:
            value = loss(rows)
            # PyTorch warns that the input of the first layer needs no gradient.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                value.backward()  # type: ignore[no-untyped-call]
        finally:
            self._hooks.disable_hooks()
        if any(len(p.grad_sample) != len(rows) for p in self._params):  # type: ignore[attr-defined]
            raise InternalError(
                "differential privacy: the loss must pass each row through each layer exactly once"
            )
        return value.detach()

    def close(self) -> None:
        """Removes opacus's hooks from the module, which then trains normally."""
        self._hooks.cleanup()
        for layer in self._module.modules():
            layer.__dict__.pop("activations", None)
            layer.__dict__.pop("max_batch_len", None)
        for p in self._params:
            p.__dict__.pop("summed_grad", None)

    def state(self) -> dict[str, Any]:
        """Returns the state of the optimizer and of the random generators; keep it secret. The
        module is not part of it.
        """
        return {
            "optimizer": self._optimizer.state_dict(),
            "noise": self._noise.state(),
            "key": self._key,
            "steps": self._steps,
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores the state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._noise.load_state(tree["noise"])
        self._key, self._steps = tree["key"], tree["steps"]


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
        self.batches_an_epoch = count_steps_per_epoch(len(rows), batch_size)
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
