"""Checks, before any data are read, that the phases support the recipe's task and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings, ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_party.models.training import OwnOptimizers
from vfl_party.phases.context import PlannedPhase
from vfl_party.phases.method import list_idle


def check_task(task: TaskSettings, phases: Sequence[PlannedPhase]) -> None:
    """Raises InputError if a phase does not support a setting of the recipe's task."""
    for key in sorted(task.shaped):
        check_follows(phases, key, f"task.{key}")
    if task.kind == "multilabel" or task.compares:
        check_follows(phases, task.kind, f'task.kind = "{task.kind}"')
    if task.compares:
        _check_pairs(task.kind, phases)
    if isinstance(task.threshold, ThresholdRule):
        _check_rule(phases)


def check_follows(phases: Sequence[PlannedPhase], key: str, text: str) -> None:
    """Raises InputError if the loss of a phase ignores ``key``. ``text``: The key and its value for
    the message.
    """
    for phase in phases:
        follows = phase.facts.follows
        if follows is not None and key not in follows:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} does not follow "
                f"{text}. Remove it, or use a phase of another kind.",
            )


def check_chooses(task: TaskSettings, rows: int) -> None:
    """Raises InputError if a rule chooses the threshold and there are no validation rows. ``rows``:
    The number of validation rows.
    """
    if isinstance(task.threshold, ThresholdRule) and not rows:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: task.threshold: the rule needs validation rows (got 0). Set rows.validation, "
            "or a number.",
        )


def check_idle(recipe: Recipe, phases: Sequence[PlannedPhase]) -> None:
    """Raises InputError if a phase gives an optimizer to a party that trains nothing in it."""
    for phase in phases:
        if not isinstance(phase.settings, OwnOptimizers):
            continue
        idle = list_idle(phase.facts, recipe)
        name = next((party for party in phase.settings.optimizers if party in idle), None)
        if name is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: optimizers: {name} trains nothing in this phase. "
                "Remove its optimizer.",
            )


def _check_pairs(kind: str, phases: Sequence[PlannedPhase]) -> None:
    """Raises InputError if a phase has batches of one row, in which the loss has no rows to
    compare.
    """
    for phase in phases:
        if phase.facts.follows is not None and getattr(phase.settings, "batch_size", None) == 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: batch_size: must be at least 2, because the loss "
                f"of a {kind} task compares the rows of a batch (got 1). Set 2 or more.",
            )


def _check_rule(phases: Sequence[PlannedPhase]) -> None:
    """Raises InputError if no phase evaluates the validation rows, with which a rule chooses the
    threshold, or if a phase trains after the last evaluation.
    """
    places = [place for place, phase in enumerate(phases) if "validation" in phase.evaluates]
    if not places:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: task.threshold: a rule chooses by the scores of validation rows, and no phase "
            'evaluates them. Add a phase of kind "evaluate", or set a number.',
        )
    later = next((phase for phase in phases[places[-1] + 1 :] if phase.method.trains), None)
    if later is not None:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: task.threshold: a rule chooses when validation rows are evaluated, and phase "
            f'{later.name!r} trains after that. Add a phase of kind "evaluate" after it, or set a '
            "number.",
        )
