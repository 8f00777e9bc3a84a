"""The student, an encoder of the active party's own columns and a top model on its embedding, and
its training with or without a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.config.models import PluginCombination
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Tree
from vfl_party.base.seeds import Rows, batches, derive_seed
from vfl_party.methods.student.settings import StudentSettings
from vfl_party.models import build_top, check_encoder, combine_widths, seed_torch
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import Precision, build_optimizer, build_schedule, clip, forward
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.stopping import get_monitored_value, is_better


class Student(nn.Module):
    """A student, with outputs [B, O]. ``match``: a linear map of the student's embedding to the
    joint representation, only for training; None without ``StudentSettings.match``.
    """

    def __init__(self, encoder: nn.Module, top: nn.Module, match: nn.Module | None) -> None:
        super().__init__()
        self.encoder, self.top, self.match = encoder, top, match

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs: Tensor = self.top(self.encoder(*inputs))
        return outputs

    def compute_parts(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs [B, O] and the mapped embedding [B, D], or None without ``match``,
        both in ``precision``.
        """
        z_BD = forward(self.encoder, *inputs, precision=precision)
        mapped = None if self.match is None else forward(self.match, z_BD, precision=precision)
        return forward(self.top, z_BD, precision=precision), mapped


def build_student(settings: StudentSettings, make: MakeEncoder) -> Student:
    """Makes a student on the CPU, with initial weights derived from the party's seeds. Raises
    InputError if the encoder does not fit the party's inputs, or if there is no joint
    representation to match.
    """
    recipe = make.recipe
    if settings.encoder is not None:
        check_encoder(settings.encoder, "recipe: phases: student: encoder")
        make = replace(make, settings=settings.encoder)
    width = settings.embedding_size or make.width
    encoder = make("solo", width=width)
    root = recipe.seed if make.secret is None else make.secret
    with seed_torch(derive_seed(root, "init", make.party, "solo top")):
        top = build_top(settings.top, width, recipe.task.outputs)
        if not settings.match:
            return Student(encoder, top, None)
        rule = recipe.model.combine
        if rule == "attention" or isinstance(rule, PluginCombination):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: student: match: with model.combine = {str(rule)!r} the top "
                "model combines the embeddings, so there is no joint representation. Remove "
                "match, or choose another combine.",
            )
        widths = [
            recipe.embedding_size(member.name) for member in recipe.parties if member.features
        ]
        return Student(encoder, top, nn.Linear(width, combine_widths(rule, widths)))


def count_epochs(party: Party, settings: StudentSettings) -> int:
    """Returns the number of epochs of the phase, which all parties can compute from the common
    rows.
    """
    return settings.epochs_over(len(party.rows.get("aligned")))


def count_rounds(party: Party, settings: StudentSettings) -> int:
    """Returns the maximum number of rounds: one for the embeddings, and then the training
    rounds.
    """
    return 1 + -(-count_epochs(party, settings) // settings.validate_every)


class TeacherAnswers:
    """The teacher's answers: the outputs of the joint model for the rows that all parties hold.

    ``rows``: the row numbers, ascending, [N]. ``outputs``: the joint model's outputs [N, O].
    ``joint``: the joint representations [N, D] if the student matches them, else None.
    """

    def __init__(self, rows: Rows, outputs: Tensor, joint: Tensor | None) -> None:
        self.rows, self.outputs, self.joint = rows, outputs, joint


class Learner:
    """Trains ``model`` on ``rows``, epoch by epoch, with the teacher's ``answers``, or without a
    teacher if these are None.

    Args:
        labelled: The rows whose labels are used, ascending.
        answers: The teacher's answers; None: there is no teacher, and all ``rows`` are labelled.
        passes: The number of times that an epoch goes over ``rows``.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: StudentSettings,
        model: Student,
        rows: Rows,
        labelled: Rows,
        *,
        passes: int = 1,
    ) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self.model, self._rows, self._passes = model, rows, passes
        self._labelled, self._weights = labelled, party.rows.compute_weights(labelled)
        norms = any(isinstance(module, _BatchNorm) for module in model.modules())
        if norms and min(settings.batch_size, len(rows)) < 2:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: batch normalization needs batches of at least 2 rows. "
                "Add rows, or increase batch_size.",
            )
        self._params = list(model.parameters())
        self._optimizer = build_optimizer(settings.optimizer, self._params)
        self._epochs = count_epochs(party, settings)
        self._schedule = build_schedule(settings.optimizer, self._optimizer, self._epochs)
        self._loss = loss_fn(party.recipe.task)
        self.answers: TeacherAnswers | None = None
        # ``done``: the number of finished epochs. ``_best``: the metric of the best validation, and
        # the number of epochs before it.
        self.done, self._best_weights = 0, dict[str, Tensor]()
        self._best: dict[str, Any] = {}
        self._stopped = False

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended, after all epochs or by early stopping."""
        return self._stopped or self.done >= self._epochs

    def run(self, tick: Callable[[], None]) -> tuple[int, float]:
        """Trains for the next ``validate_every`` epochs, or fewer at the end. Returns the number of
        steps and their mean loss.
        """
        steps, total = 0, torch.zeros((), device=self._party.device)
        self.model.train()
        for _ in range(min(self._settings.validate_every, self._epochs - self.done)):
            # The seed makes dropout depend only on the epoch, not on other random draws.
            with seed_torch(derive_seed(self._party.own_seed, self._phase, "dropout", self.done)):
                for batch in self._make_batches():
                    total += self._step(batch)
                    steps += 1
            self.done += 1
            self._schedule.step()
            tick()
        return steps, total.item() / max(1, steps)

    def _make_batches(self) -> list[Rows]:
        seed, first_epoch = self._party.own_seed, self.done * self._passes
        size = self._settings.batch_size
        epochs = range(first_epoch, first_epoch + self._passes)
        return [
            rows for epoch in epochs for rows in batches(seed, self._phase, epoch, self._rows, size)
        ]

    def _step(self, batch: Rows) -> Tensor:
        loss = self.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(self._settings.optimizer, self._params)
        self._optimizer.step()
        return loss.detach()

    def loss(self, batch: Rows) -> Tensor:
        """Returns the loss of a batch of rows; see ``StudentSettings``."""
        party, settings = self._party, self._settings
        inputs = party.rows.need_features().inputs(batch)
        outputs, mapped = self.model.compute_parts(party.recipe.model.precision, *inputs)
        total = outputs.new_zeros(())
        positions = np.flatnonzero(np.isin(batch, self._labelled))
        if len(positions):
            _, targets = party.rows.need_labels()
            w_B = (
                None if self._weights is None else party.rows.take(self._weights, batch[positions])
            )
            loss = self._loss(
                party.rows.take(outputs, positions), party.rows.take(targets, batch[positions]), w_B
            )
            total = total + loss * (len(positions) / len(batch))
        if self.answers is None:
            return total
        positions = np.flatnonzero(np.isin(batch, self.answers.rows))
        places = np.searchsorted(self.answers.rows, batch[positions])
        if settings.weight:
            teacher_outputs = party.rows.take(self.answers.outputs, places)
            task, student_outputs = party.recipe.task, party.rows.take(outputs, positions)
            distance_B = distillation_distance(
                task, settings.temperature, student_outputs, teacher_outputs
            )
            total = total + settings.weight * distance_B.sum() / len(batch)
        if mapped is not None and self.answers.joint is not None:
            joint = party.rows.take(self.answers.joint, places)
            distance_B = (party.rows.take(mapped, positions) - joint).square().mean(dim=1)
            total = total + settings.match * distance_B.sum() / len(batch)
        return total

    def record_validation(self, metrics: Mapping[str, float]) -> None:
        """Compares a validation with the best one so far, keeps the best weights, and decides on
        early stopping.
        """
        rule = self._settings.early_stopping
        if rule is None:
            return
        value = get_monitored_value(self._phase, rule, metrics)
        task = self._party.recipe.task
        if not self._best or is_better(task, rule, value, self._best["value"]):
            self._best = {"value": value, "epochs": self.done}
            self._best_weights = {
                name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()
            }
        validations_since_best = -(
            -(self.done - self._best["epochs"]) // self._settings.validate_every
        )
        self._stopped = validations_since_best >= rule.patience

    def restore_best(self) -> int:
        """Loads the best weights. Returns the number of epochs after which they were reached."""
        if self._best:
            self.model.load_state_dict(self._best_weights)
        return self._best["epochs"] if self._best else self.done

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "done": self.done,
            "best": self._best,
            "best_weights": self._best_weights,
            "stopped": self._stopped,
        }

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
        self.done, self._best, self._stopped = tree["done"], tree["best"], tree["stopped"]
        self._best_weights = tree["best_weights"]


# Computes the distance between the outputs of student and teacher, which distillation minimizes.
#
# The method is from Hinton, Vinyals and Dean 2015 (arXiv 1503.02531, section 2). The teacher is the
# joint model, which uses columns that the student never has. This is learning with privileged
# information (Lopez-Paz et al. 2015, arXiv 1511.03643; Semi-VFL, arXiv 2209.15635; APC-VFL, arXiv
# 2410.17648).


def distillation_distance(
    task: TaskSettings, temperature: float, s_BO: Tensor, t_BO: Tensor
) -> Tensor:
    """Returns the distance of each row's output from the teacher's output, float32 [B].

    Multiclass: T² · KL(softmax(t/T) ‖ softmax(s/T)). Binary and multilabel: the same with sigmoids
    instead of softmax, as a mean over the labels. Regression: (s − t)², on scaled values, or on
    logarithms if the task predicts counts. The factor T² keeps the size of the gradient when T
    changes.

    Args:
        task: A multiclass, binary, multilabel or regression task.
        temperature: The temperature T.
        s_BO: The student's outputs [B, O]: logits, or values.
        t_BO: The teacher's outputs [B, O]: logits, or values.
    """
    if task.kind == "regression":
        return (s_BO - t_BO).square().mean(dim=1)
    s_BO, t_BO = s_BO / temperature, t_BO / temperature
    if task.kind == "multiclass":
        log_t_BO = t_BO.log_softmax(dim=1)
        each_B = (log_t_BO.exp() * (log_t_BO - s_BO.log_softmax(dim=1))).sum(dim=1)
    else:
        each_B = (
            t_BO.sigmoid() * (F.logsigmoid(t_BO) - F.logsigmoid(s_BO))
            + (-t_BO).sigmoid() * (F.logsigmoid(-t_BO) - F.logsigmoid(-s_BO))
        ).mean(dim=1)
    return temperature**2 * each_B
