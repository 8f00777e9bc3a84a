"""``vfl.search``: tries values of a recipe's keys, and chooses by the validation rows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vfl.library import cells
from vfl.library.data import with_data
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.rounds import Round
from vfl.library.run import Run
from vfl.library.simulate import simulate
from vfl.library.study import speaker
from vfl.searching import journal
from vfl.searching.spaces import Between, Space, points, spaces_of
from vfl.studies.kept import Prints, inputs_of
from vfl.studies.lines import named
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import locked, require_folder, write_atomic
from vfl_party.base.plugins import Given

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


@dataclass(frozen=True)
class Trial:
    """One try. ``state``: ``finished``, ``pruned`` or ``failed``; ``value``: of the objective,
    None unless it finished; ``rounds``: those that were compared with other trials; ``error``: why
    it failed.
    """

    values: dict[str, Any]
    state: str
    value: float | None
    rounds: int
    error: str | None


@dataclass(frozen=True)
class Search:
    """A finished search. ``best``: the chosen values; ``value``: their objective; ``run``: the run
    that had them, whose test rows nothing was chosen by; ``folder``: has the pictures.
    """

    objective: str
    trials: tuple[Trial, ...]
    best: dict[str, Any]
    value: float
    run: Run
    folder: Path

    @property
    def test(self) -> dict[str, float]:
        """The metrics of the test rows, of the chosen run alone."""
        return self.run.metrics.get("test", {})

    def columns(self) -> dict[str, list[Any]]:
        """Returns a row a trial, as columns: the keys, ``state``, the objective, ``rounds``,
        ``error``.
        """
        keys = dict.fromkeys(key for each in self.trials for key in each.values)
        return {
            **{key: [each.values.get(key) for each in self.trials] for key in keys},
            "state": [each.state for each in self.trials],
            self.objective: [each.value for each in self.trials],
            "rounds": [each.rounds for each in self.trials],
            "error": [each.error for each in self.trials],
        }

    def __repr__(self) -> str:
        counts = [
            f"{sum(each.state == state for each in self.trials)} {state}"
            for state in ("finished", "pruned", "failed")
        ]
        return f"Search({', '.join(counts)}; {self.objective} {self.value:.4g} with {self.best})"


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
    plugins: Given | None = None,
    quiet: bool = False,
) -> Search:
    """Runs a recipe with chosen values of its keys, one run after the other in this process, and
    returns the best by the validation rows.

    Args:
        recipe: as in ``simulate``. Its own seed is that of every run.
        spaces: {key: what it may be}, with keys as in ``Recipe.replace``: a list of values, or
            ``{"from": low, "to": high}``, whole numbers if both are, evenly over the logarithm with
            ``"log": True``.
        data: as in ``simulate``.
        objective: a metric of the validation rows, such as ``validation auc``.
        runs: the number of trials, with those of ``out``; pruned and failed ones count. A grid
            has no more than its combinations.
        out: the folder of the search. The same call goes on with what is there; ``runs`` may be
            more.
        by: what chooses: ``tpe`` (tree-structured Parzen estimator, Bergstra et al. 2011),
            ``random``, or ``grid`` (every combination of lists).
        prune: whether to end a run whose objective after a round is worse than the median of the
            finished runs at that round. It needs ``early_stopping`` in a phase of the recipe,
            which measures validation rows in each round. Five trials are never pruned.
        seed: of what chooses.
        plugins: as in ``simulate``.
        quiet: whether to show nothing while it goes on.

    The test rows are no objective: what is chosen by them is not tested any more. Raises VflError:
    bad input, or no trial that finished.
    """
    made, where = Recipe.of(recipe), spaces_of(spaces)
    _check(objective, runs, by, seed)
    grid = points(where) if by == "grid" else None
    # Before the first run.
    for key, each in where.items():
        for value in (each.low, each.high) if isinstance(each, Between) else each.values:
            made.replace({key: value})
    folder = Path(out).absolute()
    require_folder(folder)
    folder.mkdir(exist_ok=True)
    with with_plugins(plugins), journal.quiet(), locked(folder):
        from vfl_party.models.metrics import lower_is_better

        name = objective.partition(" ")[2]
        _check_metric(made, name)
        asked = _digest(made, data, spaces, [objective, by, prune, seed])
        lower = lower_is_better(made.settings.task, name)
        study = journal.opened(folder, asked, where, lower=lower, prune=prune)
        every = runs if grid is None else min(runs, len(grid))
        trying = _Trying(made, where, data, name, folder, study, quiet)
        while (number := len(journal.ended(study))) < every:
            journal.choose(study, by, seed, number)
            if grid is not None and not trying.waiting():
                study.enqueue_trial(grid[number])
            trying.one(number, every)
        return _found(study, where, objective, folder)


class _Trying:
    """Makes the trials of a search."""

    def __init__(
        self,
        recipe: Recipe,
        spaces: Mapping[str, Space],
        data: Mapping[str, Any] | None,
        metric: str,
        folder: Path,
        study: optuna.Study,
        quiet: bool,
    ) -> None:
        self._recipe, self._spaces, self._data, self._metric = recipe, spaces, data, metric
        self._folder, self._study, self._quiet = folder, study, quiet

    def waiting(self) -> bool:
        """Returns whether a trial that was interrupted is to be tried next."""
        from optuna.trial import TrialState

        return bool(self._study.get_trials(states=(TrialState.WAITING,)))

    def one(self, number: int, every: int) -> None:
        """Makes a trial, and notes how it ended."""
        import optuna
        from optuna.trial import TrialState

        trial = self._study.ask()
        values = {key: each.ask(trial, key) for key, each in self._spaces.items()}
        said = ", ".join(f"{key} = {named(value)}" for key, value in values.items())
        try:
            run = simulate(
                self._recipe.replace(values),
                self._data,
                out=self._folder / "runs",
                quiet=True,
                on_round=self._watching(trial),
            )
            value = run.metrics.get("validation", {}).get(self._metric)
            if value is None or not math.isfinite(value):
                text = f"the run has no finite validation {self._metric} ({value})"
                raise InputError(Code.CONFIG_INVALID, text)
        except optuna.TrialPruned:
            self._study.tell(trial, state=TrialState.PRUNED)
            end = "pruned"
        except VflError as error:
            trial.set_user_attr(journal.ERROR, str(error))
            self._study.tell(trial, state=TrialState.FAIL)
            end = f"failed: {error}"
        else:
            trial.set_user_attr(journal.RUN, run.folder.name)
            self._study.tell(trial, value)
            end = f"validation {self._metric} {value:.4g}"
        self._say(f"run {number + 1} of {every}: {said}: {end}")

    def _watching(self, trial: optuna.Trial) -> Any:
        import optuna

        seen: set[tuple[str, int]] = set()

        def watch(each: Round) -> None:
            value = each.metrics.get("validation", {}).get(self._metric)
            # The phase evaluate has one round, after which nothing is left to prune.
            if value is None or each.rounds == 1 or (each.phase, each.round) in seen:
                return
            trial.report(value, len(seen))
            seen.add((each.phase, each.round))
            if trial.should_prune():
                raise optuna.TrialPruned

        return watch

    def _say(self, text: str) -> None:
        if not self._quiet:
            speaker()(text)


def _found(
    study: optuna.Study, spaces: Mapping[str, Space], objective: str, folder: Path
) -> Search:
    """Reads the trials of the journal, and writes the table and the pictures. Raises VflError if
    no trial finished.
    """
    ended = journal.ended(study)
    trials = tuple(_trial(each, spaces) for each in ended)
    if not any(each.state == "finished" for each in trials):
        errors = [each.error for each in trials if each.error]
        text = f"{folder}: no run of the search finished; the first error is: {errors[0]}"
        raise InputError(Code.CONFIG_INVALID, text)
    best = study.best_trial
    run = Run.load(folder / "runs" / best.user_attrs[journal.RUN])
    found = Search(
        objective, trials, _trial(best, spaces).values, float(study.best_value), run, folder
    )
    _write(found)
    _draw(study, spaces, found)
    return found


def _trial(trial: FrozenTrial, spaces: Mapping[str, Space]) -> Trial:
    names = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
    values = {}
    for key, label in trial.params.items():
        space = spaces[key]
        values[key] = (
            label if isinstance(space, Between) else space.values[space.labels.index(label)]
        )
    state = names[trial.state.name]
    value = trial.value if state == "finished" else None
    error = trial.user_attrs.get(journal.ERROR)
    return Trial(values, state, value, len(trial.intermediate_values), error)


def _write(found: Search) -> None:
    text, columns = io.StringIO(), found.columns()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_atomic(found.folder / "trials.csv", text.getvalue())


def _draw(study: optuna.Study, spaces: Mapping[str, Space], found: Search) -> None:
    import optuna

    from vfl.searching.draw import draw_importance, draw_parallel

    tried = [(each.values, each.value) for each in found.trials if each.value is not None]
    draw_parallel(spaces, tried, found.objective, found.folder / "parallel.png")
    # Nothing varies in the objective, or in what it would depend on.
    if len({value for _, value in tried}) > 1:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        if shares:
            draw_importance(shares, found.folder / "importance.png")


def _check(objective: Any, runs: Any, by: Any, seed: Any) -> None:
    split, _, name = str(objective).partition(" ")
    if split != "validation" or not name:
        text = "objective: give a metric of the validation rows, such as 'validation auc'"
        why = "; what is chosen by the test rows is not tested any more" if split == "test" else ""
        raise InputError(Code.CONFIG_INVALID, f"{text}, not {objective!r}{why}")
    for key, value, least in (("runs", runs, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            text = f"{key}: give a whole number from {least}, not {value!r}"
            raise InputError(Code.CONFIG_INVALID, text)
    if by not in get_args(journal.By):
        known = ", ".join(get_args(journal.By))
        raise InputError(Code.CONFIG_INVALID, f"by: give one of {known}, not {by!r}")


def _check_metric(recipe: Recipe, name: str) -> None:
    task = recipe.settings.task
    if name not in task.all_metrics:
        text = f"objective: a {task.kind} task has no metric {name!r}"
        raise InputError(Code.CONFIG_INVALID, f"{text}; it has {', '.join(task.all_metrics)}")


def _digest(
    recipe: Recipe, data: Mapping[str, Any] | None, spaces: Mapping[str, Any], other: list[Any]
) -> str:
    """Returns a digest of what decides the trials of a search: with other rows, it is another
    search.
    """
    tables, frames = with_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    if cells.only_here(settings) is not None:
        inputs = settings.canonical_json()
    else:
        inputs = inputs_of(settings, divide(settings, recipe.base), None, Prints(), frames)
    written = {key: list(v) if not isinstance(v, Mapping) else dict(v) for key, v in spaces.items()}
    return sha256(json.dumps([inputs, written, other], default=str).encode()).hexdigest()
