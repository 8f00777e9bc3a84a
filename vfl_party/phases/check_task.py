"""Checks that phases do what the recipe's task and optimizers ask for, before any data are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings, ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_party.models.training import OwnOptimizers

if TYPE_CHECKING:
    from vfl_party.phases.course import NamedPhase


def check_task(task: TaskSettings, phases: Sequence[NamedPhase]) -> None:
    """Raises InputError if a phase does not do what the recipe's task asks for."""
    for key in sorted(task.shaped):
        check_follows(phases, key, f"task.{key}")
    if task.kind == "multilabel" or task.compares:
        check_follows(phases, task.kind, f'task.kind = "{task.kind}"')
    if task.compares:
        _check_pairs(task.kind, phases)
    if isinstance(task.threshold, ThresholdRule):
        _check_rule(phases)


def check_follows(phases: Sequence[NamedPhase], key: str, shown: str) -> None:
    """Raises InputError if the loss of a phase does not follow a key of the task."""
    for phase in phases:
        follows = phase.method.follows(phase.settings)
        if follows is not None and key not in follows:
            text = f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} does not"
            raise InputError(
                Code.CONFIG_INVALID,
                f"{text} follow {shown}; remove it, or take a phase of another kind",
            )


def check_chooses(task: TaskSettings, rows: int) -> None:
    """Raises InputError if a rule chooses the threshold, and there are no validation ``rows``."""
    if isinstance(task.threshold, ThresholdRule) and not rows:
        text = "there are no validation rows by which the rule could choose; set rows.validation"
        raise InputError(Code.CONFIG_INVALID, f"recipe: task.threshold: {text}, or a number")


def check_idle(recipe: Recipe, phases: Sequence[NamedPhase]) -> None:
    """Raises InputError if a phase gives an optimizer to a party that trains nothing in it."""
    for phase in phases:
        if not isinstance(phase.settings, OwnOptimizers):
            continue
        idle = phase.method.idle(phase.settings, recipe)
        name = next((each for each in phase.settings.optimizers if each in idle), None)
        if name is not None:
            text = f"recipe: phases: {phase.name}: optimizers: {name} trains nothing in this phase"
            raise InputError(Code.CONFIG_INVALID, f"{text}; remove its optimizer")


def _check_pairs(kind: str, phases: Sequence[NamedPhase]) -> None:
    """Raises InputError if the batches of a phase leave the loss nothing to compare."""
    for phase in phases:
        if (
            phase.method.follows(phase.settings) is not None
            and getattr(phase.settings, "batch_size", None) == 1
        ):
            text = f"the loss of a {kind} task compares the rows of a batch, and is 0 for one row"
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: batch_size = 1: {text}; give 2 or more",
            )


def _check_rule(phases: Sequence[NamedPhase]) -> None:
    """Raises InputError if no phase evaluates the validation rows, by which a rule chooses the
    threshold, or if a phase trains after the last one that does.
    """
    places = [place for place, each in enumerate(phases) if "validation" in each.evaluates]
    if not places:
        text = "a rule chooses by the scores of validation rows, and no phase evaluates them"
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: task.threshold: {text}; add a phase of kind "evaluate", or set a number',
        )
    later = next((each for each in phases[places[-1] + 1 :] if each.method.trains), None)
    if later is not None:
        text = f"a rule chooses when validation rows are evaluated, and phase {later.name!r} trains"
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: task.threshold: {text} after that; add a phase of kind "evaluate" after it, '
            "or set a number",
        )
