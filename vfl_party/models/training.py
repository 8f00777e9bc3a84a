"""The settings and the computations of training: training budget and early stopping, the forward
pass, the combination of the parties' embeddings, the backward pass, optimizers and schedules.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vfl_common.config.base import KindName, Section
from vfl_common.config.models import (
    Combine,
    OptimizerSettings,
    PluginCombination,
    UnjudgedOptimizer,
)
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import get_real_dtype


class TrainingSettings(Section):
    """The training budget of a supervised phase, in epochs or in steps."""

    epochs: PositiveInt | None = None
    """Epochs over the training rows. Give this or ``steps``."""
    steps: PositiveInt | None = None
    """The minimum number of batches, rounded up to whole epochs. Use this for few rows."""
    batch_size: PositiveInt = 64
    """Rows of a batch."""
    optimizer: UnjudgedOptimizer = OptimizerSettings()
    """The optimizer of each party."""

    def model_post_init(self, _context: Any) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a phase needs either epochs or steps. Set one of them.")

    def epochs_over(self, rows: int) -> int:
        """Returns the number of epochs over ``rows`` training rows."""
        if self.steps is None:
            return self.epochs or 1
        whole_batches, remaining_rows = divmod(rows, self.batch_size)
        # A last batch of one row is dropped; see vfl_party.base.seeds.batches.
        has_partial_batch = remaining_rows > 1 or (
            remaining_rows == 1 and (whole_batches == 0 or self.batch_size == 1)
        )
        return -(-self.steps // max(1, whole_batches + has_partial_batch))


class EarlyStopping(Section):
    """Ends the phase when a metric on the validation rows has not improved for some time."""

    patience: PositiveInt = 5
    """The phase ends after this many validations without a better value. All parties then restore
    their best weights.
    """
    metric: KindName = "loss"
    """The metric on the validation rows."""


class OwnOptimizers(Section):
    """The key ``optimizers`` of a phase in which several parties train."""

    optimizers: dict[str, UnjudgedOptimizer] = Field(default_factory=dict)
    """{party: optimizer} for parties that do not use the phase's ``optimizer``."""


def own_optimizer(
    recipe: Recipe, phase: str, party: str, optimizers: Mapping[str, OptimizerSettings]
) -> OptimizerSettings | None:
    """Returns the optimizer that the recipe sets only for ``party``, or None.

    Raises InputError if ``optimizers`` names an unknown party.
    """
    names = [place.name for place in recipe.parties]
    for name in optimizers:
        if name not in names:
            suggestions = difflib.get_close_matches(name, names, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Did you mean "
                f"{suggestions[0]!r}?"
                if suggestions
                else f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Choose one of: "
                f"{', '.join(names)}.",
            )
    return optimizers.get(party)


Precision = Literal["float32", "bfloat16"]


def forward(model: nn.Module, *inputs: Tensor, precision: Precision) -> Tensor:
    """Runs the model and returns its output in float32, which the loss and the messages need.

    With ``bfloat16``, torch's autocast computes the matrix products and convolutions in bfloat16
    where this is safe, in the forward and the backward pass. Parameters, gradients and the
    optimizer's state stay in float32. On a CPU this function turns oneDNN off for the whole
    process, because oneDNN in torch 2.15 reads uninitialised memory in bfloat16 convolutions
    (decision 0010).
    """
    if precision == "float32":
        out: Tensor = model(*inputs)
        return out
    if inputs[0].device.type == "cpu":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call] # Not restored, because the backward pass runs after this call.
    # Inside an outer autocast, torch's cache still has the weights from before the last update.
    torch.clear_autocast_cache()
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
        out = model(*inputs)
    return out.to(get_real_dtype())


def combine(rule: Combine, embeddings: Sequence[Tensor]) -> Tensor:
    """Combines n embeddings [B, D] with the rule of the recipe.

    ``embeddings``: The active party's embedding, then those of the passive parties in the recipe's
    order. ``concat`` gives [B, n*D], or the sum of the widths if the widths differ. ``attention``
    and the combinations of plug-ins give [B, n, D], which the top model's first layer combines.
    ``sum``, ``mean`` and ``max`` give [B, D]. ``max`` sends the whole gradient of an element to
    the first party that has the maximum (``amax`` would split it evenly among ties).
    """
    if rule == "concat":
        return torch.cat(list(embeddings), dim=1)
    if rule == "attention" or isinstance(rule, PluginCombination):
        return torch.stack(list(embeddings), dim=1)
    if rule == "max":
        return torch.stack(list(embeddings)).max(dim=0).values
    total_BD = reduce(torch.add, embeddings)
    return total_BD if rule == "sum" else total_BD / len(embeddings)


class CombinedEmbeddings:
    """Combines a batch's embeddings in training and returns the gradients of received embeddings.

    Args:
        rule: The rule of the recipe that combines embeddings.
        embeddings: All embeddings to combine, [B, D] each.
        received: {party: embedding} for the embeddings of other parties, without a gradient.
        sets: Sets of embeddings, in which learnt vectors may replace the embeddings of absent
            parties. Each set is combined separately. Default: one set of all embeddings.

    The attribute ``values`` has the combination of each set. With ``sum`` or ``mean`` over all
    embeddings, every embedding has the same gradient, so autograd computes it only once.
    """

    def __init__(
        self,
        rule: Combine,
        embeddings: Sequence[Tensor],
        received: Mapping[str, Tensor],
        sets: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.received = received
        self._total_BD: Tensor | None = None
        if sets is None and rule in ("sum", "mean"):
            self._total_BD = reduce(torch.add, embeddings)
            if self._total_BD.requires_grad:
                self._total_BD.retain_grad()
            else:
                self._total_BD.requires_grad_()
            total_BD = self._total_BD
            self.values = [total_BD if rule == "sum" else total_BD / len(embeddings)]
        else:
            for z_BD in received.values():
                z_BD.requires_grad_()
            self.values = [combine(rule, subset) for subset in (sets or [embeddings])]

    def gradients(self) -> dict[str, Tensor]:
        """Returns {party: d loss / d embedding} for the received embeddings.

        Call this after ``loss.backward()``. An embedding without effect on the loss has zeros.
        """
        return {
            name: _gradient(z_BD if self._total_BD is None else self._total_BD)
            for name, z_BD in self.received.items()
        }


def _gradient(z_BD: Tensor) -> Tensor:
    return torch.zeros_like(z_BD) if z_BD.grad is None else z_BD.grad


def combine_widths(rule: Combine, widths: Sequence[int]) -> int:
    """Returns the width of the combined embeddings for a built-in rule.

    Only ``concat`` can combine embeddings of different widths.
    """
    return sum(widths) if rule == "concat" else widths[0]


def backward(z: Tensor, dz: Tensor | None = None) -> None:
    """Computes the gradients of all parameters of ``z``, like ``z.backward(dz)`` but faster.

    ``Tensor.backward`` compares the two shapes in Python and imports sympy for it, which costs
    0.5 s of processor time and 30 MB for each process, and 15 µs for each step. This function calls
    the autograd engine directly. The caller has already checked the shape of a received gradient.

    Args:
        z: A tensor with an autograd graph.
        dz: The gradient of the loss with respect to ``z``, in the same shape. If None, ``z`` is a
            scalar loss.

    Raises RuntimeError if the shapes of ``dz`` and ``z`` do not match.
    """
    gradients = (torch.ones_like(z) if dz is None else dz,)
    Variable._execution_engine.run_backward(
        (z,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


Schedule: TypeAlias = LambdaLR


class _Direct(Optimizer):
    """A torch optimizer without the decorators of its methods.

    The decorators serve ``torch.compile`` and the profiler, which no party uses. The first call of
    a decorated method would import ``torch._dynamo``, which takes 1.3 s of processor time and 170
    MB in each process. Each step would take 11 µs more (SGD of a 32-256-64 MLP: 27 instead of 16
    µs).
    """

    # The undecorated ``step`` of the torch optimizer.
    update: ClassVar[Callable[[Any], None]]

    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - as torch has it
        """Updates the parameters."""
        with torch.no_grad():
            self.update()

    step.hooked = True  # type: ignore[attr-defined] # or torch would decorate it

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(Optimizer.zero_grad)(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = inspect.unwrap(Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.load_state_dict)(self, state_dict)


class _DirectSGD(_Direct, SGD):
    update = inspect.unwrap(SGD.step)


class _Moments(NamedTuple):
    """Lists of the tensors in Adam's state, in the order of the parameters."""

    # The optimizer's state from which the tensors were listed.
    state: Mapping[Tensor, Any]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class _DirectAdam(_Direct, Adam):
    """Adam that lists its moments once instead of at each step, and calls torch's fused kernel.

    A step takes 35 instead of 55 µs, which saves 4 % of a small run's processor time. Where the
    kernel cannot be used, this class calls torch's ``step``.
    """

    # Whether all parameters have the same dtype and device. None before the first step.
    _is_uniform: bool | None = None
    _moments: _Moments | None = None

    def update(self) -> None:
        """Updates the parameters with the same result as torch's ``step``."""
        grads, group, moments = self._dense_gradients(), self.param_groups[0], self._moments
        # This is the first step, or load_state_dict has replaced the state.
        if grads is None or moments is None or moments.state is not self.state:
            _adam_step(self)
            states = (
                [self.state[parameter] for parameter in group["params"]]
                if grads is not None
                else []
            )
            names = ("exp_avg", "exp_avg_sq", "step")
            self._moments = (
                _Moments(self.state, *([state[name] for state in states] for name in names))
                if states
                else None
            )
            return
        torch._foreach_add_(moments.steps, 1)
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            group["params"],
            grads,
            moments.first,
            moments.second,
            [],
            moments.steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _dense_gradients(self) -> list[Tensor] | None:
        """Returns all parameters' gradients, or None if one kernel call cannot apply them."""
        group, *other_groups = self.param_groups
        if self._is_uniform is None:
            kinds = {(parameter.device, parameter.dtype) for parameter in group["params"]}
            self._is_uniform = not other_groups and len(kinds) == 1
        grads = [parameter.grad for parameter in group["params"]]
        return (
            grads
            if self._is_uniform and all(grad is not None and not grad.is_sparse for grad in grads)
            else None
        )


_adam_step = inspect.unwrap(Adam.step)


class _DirectAdamW(_DirectAdam, AdamW):
    """AdamW. As in torch, it is Adam with another kind of weight decay in its parameter group."""


class _DirectAdagrad(_Direct, Adagrad):
    update = inspect.unwrap(Adagrad.step)


def build_optimizer(settings: OptimizerSettings, params: Iterable[Tensor]) -> Optimizer:
    """Builds SGD, Adam, AdamW or Adagrad for ``params``, which must already be on their device.

    torch's fused kernels are also the fastest on the CPU: an Adam step takes 46 instead of 107 µs
    for a 64-256-64 MLP, and 11 instead of 60 ms for a ResNet-18. SGD and Adagrad gain as much. The
    results differ from those of the default kernels only by rounding (tested). They are identical
    in every run with the same number of threads.

    Raises InputError if ``params`` is empty.
    """
    params = list(params)
    if not params:
        raise InputError(
            Code.MODEL_INVALID,
            'model.encoder: kind "raw" has no weights to train. Use another encoder for this '
            "phase, or remove the phase.",
        )
    lr, decay = settings.lr, settings.weight_decay
    if settings.kind == "sgd":
        return _DirectSGD(params, lr=lr, momentum=settings.momentum, weight_decay=decay, fused=True)
    if settings.kind == "adam":
        return _DirectAdam(params, lr=lr, weight_decay=decay, fused=True)
    if settings.kind == "adamw":
        return _DirectAdamW(params, lr=lr, weight_decay=decay, fused=True)
    return _DirectAdagrad(params, lr=lr, weight_decay=decay, fused=True)


def keep_rate(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Moves ``params`` to a parameter group with a constant learning rate.

    Call this before ``build_schedule``, which then does not change the rate of this group.
    """
    if not params:
        return
    (group,) = optimizer.param_groups
    moved_ids = {id(parameter) for parameter in params}
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved_ids]
    options = {key: value for key, value in group.items() if key != "params"}
    optimizer.add_param_group({**options, "params": list(params), "kept": True})


class Plateau(LambdaLR):
    """Lowers the learning rate when validations no longer improve.

    This is torch's ``ReduceLROnPlateau`` with ``threshold = 0``, except that it takes whether a
    validation was the best so far instead of the metric's value. Every party knows the former, but
    only the active party knows the value. ``patience`` is torch's ``patience`` plus one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_factor: Callable[[int], float],
        factor: float,
        patience: int,
    ) -> None:
        # torch saves all public attributes in the schedule's state_dict.
        self.factor, self.patience, self.waited, self.lowered = factor, patience, 0, 0
        super().__init__(optimizer, lambda epoch: warmup_factor(epoch) * self.factor**self.lowered)

    def note_validation(self, *, best: bool) -> None:
        """Notes a validation's result, and lowers the rate after ``patience`` worse results."""
        self.waited = 0 if best else self.waited + 1
        if self.waited < self.patience:
            return
        self.waited, self.lowered = 0, self.lowered + 1
        self._last_lr = [
            base_rate * factor_of(self.last_epoch)
            for base_rate, factor_of in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def build_schedule(settings: OptimizerSettings, optimizer: Optimizer, epochs: int) -> Schedule:
    """Builds the learning-rate schedule. Call its ``step`` at the end of each epoch.

    With w = ``warmup_epochs``, the rate in epoch e < w is lr * (e + 1) / (w + 1). After the
    warm-up, e counts from w. ``constant``: lr. ``cosine``: lr * (1 + cos(pi * e / (epochs - w))) /
    2, which is 0 after ``epochs`` steps. ``step``: lr * factor ** (e // step_epochs). ``plateau``:
    see ``Plateau``. Raises InputError if the warm-up takes all epochs.
    """
    warmup = settings.warmup_epochs
    if warmup and warmup >= epochs:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: optimizer.warmup_epochs: must be less than the {epochs} epochs (got "
            f"{warmup}). Set fewer warm-up epochs.",
        )
    decay = _decay(settings, epochs - warmup)

    def factor(epoch: int) -> float:
        return (epoch + 1) / (warmup + 1) if epoch < warmup else decay(epoch - warmup)

    if settings.schedule == "plateau":
        return Plateau(optimizer, factor, settings.factor, settings.plateau_patience)
    return LambdaLR(
        optimizer,
        [_constant_factor if group.get("kept") else factor for group in optimizer.param_groups],
    )


def _constant_factor(_epoch: int) -> float:
    return 1.0


def _decay(settings: OptimizerSettings, epochs: int) -> Callable[[int], float]:
    """Returns a function of the epoch after the warm-up that gives the learning rate's factor."""
    step_epochs = settings.step_epochs
    if settings.schedule == "cosine":
        return lambda epoch: (1 + math.cos(math.pi * min(epoch / max(epochs, 1), 1.0))) / 2
    if settings.schedule == "step" and step_epochs is not None:
        return lambda epoch: float(settings.factor ** (epoch // step_epochs))
    return lambda _epoch: 1.0


def clip(settings: OptimizerSettings, params: Iterable[Tensor]) -> None:
    """Scales the gradients of ``params`` in place to a joint L2 norm of at most ``clip_norm``.

    torch multiplies the gradients by clip_norm / (norm + 1e-6) if this factor is less than 1.
    Without ``clip_norm`` this function does nothing.
    """
    if settings.clip_norm is not None:
        nn.utils.clip_grad_norm_(params, settings.clip_norm)
