"""``vfl.search``: tries values of a recipe's keys, and chooses by the validation rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from vfl.library import cells
from vfl.library.data import with_data
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.simulate import ours
from vfl.library.study import number_of_jobs, speaker
from vfl.searching import journal
from vfl.searching.drivers import in_others
from vfl.searching.found import Search, read_result
from vfl.searching.progress import SearchProgress, Tell, sentence
from vfl.searching.spaces import Between, points, spaces_of, write_spaces
from vfl.searching.trying import TrialPlan, drive
from vfl.studies.kept import Fingerprints, inputs_of
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError
from vfl_common.files import require_folder
from vfl_party.base.plugins import RunPlugins


def search(
    recipe: GivenRecipe,
    spaces: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    *,
    objective: str,
    runs: int,
    out: str | Path,
    by: journal.By = "tpe",
    prune: bool = True,
    seed: int = 0,
    plugins: RunPlugins | None = None,
    quiet: bool = False,
    jobs: int = 1,
    backend: str | None = None,
) -> Search:
    """Runs a recipe with chosen values of its keys, and returns the best by the validation rows.

    Args:
        recipe: as in ``simulate``. Every run has its own seed.
        spaces: {key: its possible values}, with keys as in ``Recipe.replace``: a list of values, or
            ``{"from": low, "to": high}``: integers if both are, uniform in the logarithm with
            ``"log": True``.
        data: as in ``simulate``.
        objective: a metric of the validation rows, such as ``validation auc``.
        runs: the number of trials, with those in ``out``; pruned and failed ones count. A grid has
            at most its combinations.
        out: the folder of the search. The same call resumes what is there; ``runs`` may be larger.
            Several programs that make the same call share the trials, also on several machines
            that share the folder.
        by: the sampler: ``tpe`` (tree-structured Parzen estimator, Bergstra et al. 2011),
            ``random``, or ``grid`` (every combination of lists).
        prune: whether to end a run whose objective after a round is worse than the median of the
            finished runs at that round. It needs ``early_stopping`` in a phase of the recipe,
            which measures validation rows in each round. Five trials are never pruned.
        seed: the seed of the sampler.
        plugins: as in ``simulate``; with ``jobs``, only objects that other processes can import.
        quiet: whether to show nothing while it goes on.
        jobs: the number of runs at a time. With 1, they are made in this process; otherwise as many
            processes make them. ``random`` and ``grid`` try the same values with any number of
            jobs; what ``tpe`` chooses, and what is pruned, depends on which runs have ended.
        backend: the name of a backend of joblib, whose processes make the runs instead, as in
            ``study``.

    The test rows cannot be an objective: a choice by the test rows biases their metrics. Raises
    VflError: bad input, or no trial that finished.
    """
    say = speaker() if not quiet else None

    def tell(event: dict[str, Any]) -> None:
        if say is not None and event["event"] != "study":
            say(sentence(event))

    with with_plugins(plugins):
        plan = plan_of(
            Recipe.of(recipe),
            spaces,
            data,
            Path(out),
            objective=objective,
            runs=runs,
            by=by,
            prune=prune,
            seed=seed,
        )
        return run_search(plan, data, jobs=jobs, backend=backend, tell=tell)


def plan_of(
    recipe: Recipe,
    spaces: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    out: Path,
    *,
    objective: Any,
    runs: Any,
    by: Any,
    prune: Any,
    seed: Any,
) -> TrialPlan:
    """Checks the arguments of ``search`` before the first run. Raises InputError."""
    where = spaces_of(spaces)
    _check(objective, runs, by, seed)
    if by == "grid":
        points(where)
    for key, space in where.items():
        for value in (space.low, space.high) if isinstance(space, Between) else space.values:
            changed = recipe.replace({key: value})
            if key.startswith("phases."):
                _check_phases(changed)
    _check_metric(recipe, objective.partition(" ")[2])
    asked = _digest(recipe, data, write_spaces(where), [objective, by, prune, seed])
    return TrialPlan(recipe, where, objective, runs, out.absolute(), by, bool(prune), seed, asked)


def run_search(
    plan: TrialPlan,
    data: Mapping[str, Any] | None,
    *,
    jobs: int,
    backend: str | None,
    tell: Tell,
) -> Search:
    """Makes the trials that are left, and returns the result.

    ``tell``: called with an event at the beginning, and when a trial of any driver has ended.
    Raises VflError.
    """
    at_a_time = number_of_jobs(jobs)
    require_folder(plan.folder)
    plan.folder.mkdir(exist_ok=True)
    with journal.quiet(), ours():
        progress = SearchProgress(plan, tell, at_a_time)
        if progress.left and (at_a_time > 1 or backend is not None):
            several = min(at_a_time, progress.left)
            in_others(plan, data, several, backend, progress.look)
        else:
            drive(plan, data, progress.look)
        progress.look()
        return read_result(plan)


def _check(objective: Any, runs: Any, by: Any, seed: Any) -> None:
    split, _, name = str(objective).partition(" ")
    if split != "validation" or not name:
        raise InputError(
            Code.CONFIG_INVALID,
            "objective: must be a metric of the validation rows, not the test rows (got "
            f"{objective!r}). Give one such as 'validation auc'.",
        )
    for key, value, minimum in (("runs", runs, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: must be an integer of at least {minimum} (got {value!r}). Correct it.",
            )
    if by not in get_args(journal.By):
        raise InputError(
            Code.CONFIG_INVALID,
            f"by: unknown sampler {by!r}. Choose one of {', '.join(get_args(journal.By))}.",
        )


def _check_phases(recipe: Recipe) -> None:
    """Reads the keys of all phases, which a recipe leaves to their methods."""
    from vfl_party.phases.course import Course

    for phase in Course(recipe.settings).phases:
        _ = phase.settings


def _check_metric(recipe: Recipe, name: str) -> None:
    task = recipe.settings.task
    if name not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"objective: a {task.kind} task has no metric {name!r}. Choose one of "
            f"{', '.join(task.all_metrics)}.",
        )


def _digest(
    recipe: Recipe, data: Mapping[str, Any] | None, spaces: Mapping[str, Any], other: list[Any]
) -> str:
    """Returns a digest of what decides the trials of a search, including the rows."""
    tables, frames = with_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    if cells.only_here(settings) is not None:
        inputs = settings.canonical_json()
    else:
        inputs = inputs_of(settings, divide(settings, recipe.base), None, Fingerprints(), frames)
    return sha256(json.dumps([inputs, spaces, other], default=str).encode()).hexdigest()
