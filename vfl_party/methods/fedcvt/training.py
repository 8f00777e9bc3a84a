"""Code that both sides of FedCVT share: the exchanges, the batches, the encoders, the terms of the
loss, the check of a recipe, and the optimizer of a party's models.

Both parties have the same batches of aligned rows, which are known before the phase begins. A
representation R [N, D] consists of the unique half U [N, D/2] and then the shared half C. Equation
numbers are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import get_real_dtype
from vfl_party.base.seeds import Rows, batches, derive_seed, full_batches
from vfl_party.methods.fedcvt.settings import FedCVTSettings, Preset
from vfl_party.models.losses import scores
from vfl_party.models.training import build_optimizer, build_schedule, clip, own_optimizer
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, Traffic, f32, noise
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.diverged import check_own
from vfl_party.phases.scoring import scoring, scoring_traffic

VALIDATION = scoring(name="validation")


def declare_representations(settings: FedCVTSettings) -> Exchange:
    """Declares the exchange of a step: the passive party sends representations, and the active
    party returns the gradients of the loss.

    The tensor ``aligned`` is for the step's aligned rows, labelled rows first. The tensor ``own``
    is for rows that only the passive party has, if such rows are used.
    """
    up, down = {"aligned": f32("rows", "width")}, {"d_aligned": f32("rows", "width")}
    if settings.get_own_batch_size("passive"):
        up["own"], down["d_own"] = f32("own", "width"), f32("own", "width")
    return Exchange(
        "representations",
        Sent(Kind.EMBEDDING, up),
        Sent(Kind.GRADIENT, down, noise("iso", amplifier=settings.iso)),
    )


@dataclass(frozen=True)
class CrossViewStep:
    """The rows of one step at one party.

    ``last``: whether the step is the last of its epoch. ``pseudo``: whether rows may get
    pseudo-labels.
    """

    labelled: Rows
    unlabelled: Rows
    own: Rows
    last: bool
    pseudo: bool

    @property
    def aligned(self) -> int:
        """The number of aligned rows in the step."""
        return len(self.labelled) + len(self.unlabelled)

    @property
    def rows(self) -> Rows:
        """All rows of the step, in the order of their representations."""
        return np.concatenate([self.labelled, self.unlabelled, self.own])


class BatchCycle:
    """Yields full batches of some rows, step after step, and reshuffles the rows when all are
    used.
    """

    def __init__(self, seed: int, label: str, rows: Rows, size: int) -> None:
        self._seed, self._label, self._rows, self.size = seed, label, rows, size
        self._drawn: tuple[int, list[Rows]] = (-1, [])

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def is_too_short(self) -> bool:
        """Whether there are fewer rows than a batch needs."""
        return self.size > self.count

    def get_batch(self, step: int) -> Rows:
        """Returns the batch of a step, numbered through the phase."""
        if not self.size:
            return self._rows[:0]
        cycle, place = divmod(step, self.count // self.size)
        if self._drawn[0] != cycle:
            self._drawn = (
                cycle,
                full_batches(self._seed, self._label, cycle, self._rows, self.size),
            )
        return self._drawn[1][place]


class FedCVTBatches:
    """Computes the epochs and rounds of a phase and the batches of their steps. Raises InputError
    if there are too few aligned rows.
    """

    def __init__(self, party: Party, phase: str, settings: FedCVTSettings) -> None:
        self._seed, self._phase, self._settings = party.recipe.seed, phase, settings
        self._labelled = party.rows.get("train")
        if len(self._labelled) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: there are no labelled training rows. Add rows with "
                "labels to the training split.",
            )
        unlabelled, size = (
            np.setdiff1d(party.rows.get("aligned"), self._labelled),
            settings.unlabelled_batch_size,
        )
        if size > len(unlabelled):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: unlabelled_batch_size must be at most the number of "
                f"aligned training rows without labels, {len(unlabelled)} (got {size}). Set a "
                "smaller unlabelled_batch_size.",
            )
        self._unlabelled = BatchCycle(self._seed, f"{phase} unlabelled", unlabelled, size)
        self.epochs = settings.epochs_over(len(self._labelled))
        self.rounds = -(-self.epochs // settings.validate_every)
        self._warmup = int(self.epochs * settings.warmup)
        # The sizes of the batches are the same in every epoch.
        self._sizes = [len(rows) for rows in self._make_epoch(0)]

    @property
    def min_step_rows(self) -> int:
        """The number of aligned rows in the smallest step."""
        return min(self._sizes) + self._settings.unlabelled_batch_size

    def get_round_epochs(self, round_: int) -> range:
        """Returns the epochs of a round."""
        begin = round_ * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def get_step_sizes(self, round_: int) -> list[int]:
        """Returns the number of aligned rows of each step of a round, in order."""
        return [
            size + self._settings.unlabelled_batch_size
            for _ in self.get_round_epochs(round_)
            for size in self._sizes
        ]

    def get_round_steps(self, round_: int, own: BatchCycle) -> list[CrossViewStep]:
        """Returns the steps of a round, in order. ``own``: the batches of rows that only this party
        has.
        """
        steps = []
        for epoch in self.get_round_epochs(round_):
            for batch, rows in enumerate(self._make_epoch(epoch)):
                step, last = epoch * len(self._sizes) + batch, batch + 1 == len(self._sizes)
                steps.append(
                    CrossViewStep(
                        rows,
                        self._unlabelled.get_batch(step),
                        own.get_batch(step),
                        last,
                        epoch >= self._warmup,
                    )
                )
        return steps

    def _make_epoch(self, epoch: int) -> list[Rows]:
        return batches(self._seed, self._phase, epoch, self._labelled, self._settings.batch_size)


def make_own_cycle(party: Party, phase: str, settings: FedCVTSettings) -> BatchCycle:
    """Returns the batches of training rows that only this party has, in an order that only it
    knows.

    Raises InputError if there are fewer rows than a batch needs. With ``rows.align = "psi"`` these
    rows are unknown until the parties have joined, so the check comes in the first round.
    """
    rows = np.setdiff1d(party.rows.get("local"), party.rows.get("aligned"))
    seed, size = derive_seed(party.own_seed, party.name), settings.get_own_batch_size(party.role)
    cycle = BatchCycle(seed, f"{phase} own", rows, size)
    if cycle.is_too_short and party.recipe.rows.align != "psi":
        raise make_shortage_error(party, phase, cycle)
    return cycle


def make_shortage_error(party: Party, phase: str, own: BatchCycle) -> InputError:
    """Returns the error for a party that has fewer rows of its own than a step uses."""
    other = "passive" if party.role == "active" else "active"
    return InputError(
        Code.CONFIG_INVALID,
        f"recipe: phases: {phase}: own_batch_size must be at most {own.count}, the number of "
        f"training rows that only {party.name} has (got {own.size}). Set a smaller own_batch_size "
        f'(0 uses none), or set own_rows = "{other}" if that party has more.',
    )


def traffic(party: Party, name: str, settings: FedCVTSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    check_recipe(party.recipe, name)
    return Traffic(_yield_occurrences(party, name, settings, FedCVTBatches(party, name, settings)))


def _yield_occurrences(
    party: Party, name: str, settings: FedCVTSettings, batches: FedCVTBatches
) -> Iterator[Occurrence]:
    exchange, sizes = (
        declare_representations(settings),
        {"width": party.exchanges.width, "own": settings.get_own_batch_size("passive")},
    )
    for round_ in range(batches.rounds):
        step_sizes = batches.get_step_sizes(round_)
        for batch, rows in enumerate(step_sizes):
            yield Occurrence.of(exchange, StepKey(name, round_, batch), rows=rows, **sizes)
        yield from scoring_traffic(
            party, name, VALIDATION, round_, len(step_sizes), party.rows.get("validation")
        )


# The names of the two networks, from which the seeds of their initial weights are also derived.
UNIQUE, SHARED = "unique", "shared"


class TwoNetworks(nn.Module):
    """Computes R = [U; C] with U = unique(x) and C = shared(x).

    Args:
        unique, shared: Encoders of the same inputs, each of which computes half of the recipe's
            embedding.
    """

    def __init__(self, unique: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.unique, self.shared = unique, shared

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        return torch.cat([self.unique(*inputs), self.shared(*inputs)], dim=1)


def make_two_networks(_settings: FedCVTSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that later phases get, with its initial weights. See ``Method.encoder``.
    Raises InputError if the embedding size is odd.
    """
    width = make.width
    if width % 2:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: fedcvt gives each of a party's two networks half of the embedding, "
            f"so model.embedding_size must be even (got {width}). Set an even number.",
        )
    return TwoNetworks(make(UNIQUE, width=width // 2), make(SHARED, width=width // 2))


def split_halves(r_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the unique and the shared half of representations [N, D], [N, D/2] each."""
    unique_NH, shared_NH = r_ND.chunk(2, dim=1)
    return unique_NH, shared_NH


def attend(q_NH: Tensor, k_MH: Tensor, v_MH: Tensor, sharpen: float) -> Tensor:
    """Returns attention, [N, H]: the mean of the values, weighted by softmax(q·k / √H) raised to
    the power 1 / ``sharpen``.
    """
    weights_NM = (q_NH @ k_MH.T / (math.sqrt(q_NH.shape[1]) * sharpen)).softmax(dim=1)
    return weights_NM @ v_MH


@dataclass(frozen=True)
class Representations:
    """One party's representations in a step, for the aligned rows [M, D] and for the rows that only
    this party has [N, D].
    """

    aligned: Tensor
    own: Tensor

    @property
    def all(self) -> Tensor:
        """All representations, [M + N, D]: first for the aligned rows, then for the party's own
        rows.
        """
        return torch.cat([self.aligned, self.own])


def estimate_view(
    r_ND: Tensor, source: Representations, other: Representations, sharpen: float
) -> Tensor:
    """Estimates the other party's representations [N, D] of rows for which one party has the
    representations ``r_ND``.

    U is estimated by attention over the aligned rows, with this party's representations as keys and
    the other party's as values. C is estimated by attention over all of the other party's rows in
    the step, because shared representations are comparable across parties.
    """
    (unique_NH, shared_NH), (keys_MH, _) = split_halves(r_ND), split_halves(source.aligned)
    (values_MH, _), (_, all_shared) = split_halves(other.aligned), split_halves(other.all)
    unique = attend(unique_NH, keys_MH, values_MH, sharpen)
    return torch.cat([unique, attend(shared_NH, all_shared, all_shared, sharpen)], dim=1)


def mean_distance(a_NH: Tensor, b_NH: Tensor, preset: Preset) -> Tensor:
    """Returns the mean over rows of the squared distance (Eqs. 1, 4 and 5). With preset
    ``released``, it is the mean over elements.
    """
    return (
        F.mse_loss(a_NH, b_NH) if preset == "released" else (a_NH - b_NH).square().sum(dim=1).mean()
    )


def mean_overlap(r_ND: Tensor, preset: Preset) -> Tensor:
    """Returns the mean squared inner product of a row's two halves (Eqs. 2 and 3).

    With preset ``released``, it is the Frobenius norm of the matrix of inner products between all
    rows, divided by the number of rows.
    """
    unique_NH, shared_NH = split_halves(r_ND)
    if preset == "released":
        norm: Tensor = torch.linalg.matrix_norm(unique_NH @ shared_NH.T)
        return norm / len(r_ND)
    return (unique_NH * shared_NH).sum(dim=1).square().mean()


@torch.no_grad()
def make_pseudo_labels(
    task: TaskSettings, outputs: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Returns whether each row gets a pseudo-label, bool [N], and the rows' classes, encoded as the
    task's labels.

    A row gets a pseudo-label if all classifiers predict the same class, each with a probability
    above ``threshold``. ``outputs``: the logits [N, O] of each classifier.
    """
    predictions = []
    for out_NO in outputs:
        scores_NO = scores(task, out_NO)
        predictions.append(
            (
                torch.cat([1 - scores_NO, scores_NO], dim=1) if task.kind == "binary" else scores_NO
            ).max(dim=1)
        )
    class_N = predictions[0].indices
    agree_N = torch.stack(
        [(scored.values > threshold) & (scored.indices == class_N) for scored in predictions]
    ).all(dim=0)
    return agree_N, class_N.unsqueeze(1).to(get_real_dtype()) if task.kind == "binary" else class_N


def check_recipe(recipe: Recipe, phase: str) -> None:
    """Raises InputError if FedCVT does not support the recipe's parties, task or combination."""
    if len(recipe.passives) != 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt needs exactly one passive party (got "
            f"{len(recipe.passives)}). Correct the parties, or choose another method.",
        )
    if not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt compares the views of both parties, but "
            f"{recipe.active.name} has no features. Give it features.",
        )
    if recipe.task.kind not in ("binary", "multiclass"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt needs a binary or multiclass task (got "
            f"{recipe.task.kind}). Use splitnn instead.",
        )
    if recipe.model.combine != "concat":
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: phases: {phase}: fedcvt needs model.combine = "concat" (got '
            f'"{recipe.model.combine}"). Set model.combine = "concat".',
        )


class FedCVTTraining:
    """A party's batches, and the optimizer and schedule of its models.

    ``heads``: models that are discarded after the phase. Raises InputError if FedCVT does not
    support the recipe, the encoder or the rows.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: FedCVTSettings,
        heads: Mapping[str, nn.Module] | None = None,
    ) -> None:
        check_recipe(party.recipe, phase)
        if not isinstance(party.models["encoder"], TwoNetworks):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: an earlier phase, or the run to start from, hands on "
                "an encoder that does not consist of fedcvt's two networks. Put fedcvt first.",
            )
        self._party, self._phase = party, phase
        self.batches = FedCVTBatches(party, phase, settings)
        self._own = make_own_cycle(party, phase, settings)
        self._heads = nn.ModuleDict(heads or {})
        self._models = nn.ModuleDict({**party.models, **self._heads})
        norms = any(isinstance(module, _BatchNorm) for module in self._models.modules())
        if norms and self.batches.min_step_rows + self._own.size < 2:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {party.name}: batch normalization needs batches of at least 2 rows. Add "
                "rows, increase batch_size, or choose another encoder.",
            )
        self._params = list(self._models.parameters())
        party_optimizer = own_optimizer(party.recipe, phase, party.name, settings.optimizers)
        self._settings = settings.optimizer if party_optimizer is None else party_optimizer
        self._optimizer = build_optimizer(self._settings, self._params)
        self._schedule = build_schedule(self._settings, self._optimizer, self.batches.epochs)

    def steps(self, round_: int) -> list[CrossViewStep]:
        """Returns the steps of a round. Raises InputError if this party has too few rows of its
        own.
        """
        if self._own.is_too_short:
            raise make_shortage_error(self._party, self._phase, self._own)
        return self.batches.get_round_steps(round_, self._own)

    def train_mode(self) -> None:
        """Puts the models into training mode."""
        self._models.train()

    def zero_grad(self) -> None:
        """Clears the gradients."""
        self._optimizer.zero_grad()

    def step(self, *, last: bool) -> None:
        """Clips this party's gradient if the recipe sets ``clip_norm``, and updates the models.
        ``last``: whether an epoch ends.
        """
        clip(self._settings, self._params)
        self._optimizer.step()
        if last:
            self._schedule.step()

    def check(self, step: StepKey) -> None:
        """Raises InputError if this party's weights contain NaN or infinity. ``step``: the next
        step.
        """
        check_own(self._party, step, dict(self._models.state_dict()))

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        heads: dict[str, Tensor] = dict(self._heads.state_dict())
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "heads": heads,
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
        self._heads.load_state_dict(tree["heads"])
