"""Runs the trials of a search, and reads and writes its result. Several drivers may share the
trials.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.run import Run
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.run_folder import SEARCH
from vfl_lab.searching import journal
from vfl_lab.searching.journal import Between, Claims, Space, write_spaces

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vfl.library.model import OnRound, Round
from vfl.library.recipe import Recipe
from vfl.library.simulate import Order, carry_out, in_process
from vfl_common.errors import UnwritableError, VflError
from vfl_common.files import PLAIN_NAME
from vfl_lab.searching.journal import list_grid_points

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

# The interval at which a driver without a trial checks whether another driver has ended.
_TICK_S = 0.2
# The subfolder of a search's folder that contains its runs.
RUNS = "runs"


@dataclass(frozen=True)
class TrialPlan:
    """The plan of a search, for its drivers. The fields are the checked arguments of ``search``.

    ``digest``: A digest of the recipe, the rows and the arguments, which determine the trials.
    """

    recipe: Recipe
    spaces: Mapping[str, Space]
    objective: str
    runs: int
    folder: Path
    by: journal.By
    prune: bool
    seed: int
    digest: str

    @property
    def metric(self) -> str:
        """The name of the metric, without the split, such as ``auc``."""
        return self.objective.partition(" ")[2]

    @property
    def trial_count(self) -> int:
        """The number of trials. A grid search has at most one trial for each point of the grid."""
        return (
            min(self.runs, len(list_grid_points(self.spaces))) if self.by == "grid" else self.runs
        )

    def open_study(self) -> optuna.Study:
        """Opens the journal of the search. Raises InputError if it belongs to another search."""
        from vfl_party.models.metrics import lower_is_better

        lower = lower_is_better(self.recipe.settings.task, self.metric)
        return journal.open_study(
            self.folder, self.digest, self.spaces, lower=lower, prune=self.prune
        )


def drive(
    plan: TrialPlan, data: Mapping[str, Any] | None, look: Callable[[], None] = lambda: None
) -> None:
    """Runs trials until all trials of the search have ended, including those of other drivers.

    ``data`` is as in ``simulate``. ``look`` is called after each trial. Raises InputError.
    """
    with Claims(plan.folder) as claims:
        driver = _Driver(plan, data, claims)
        while not driver.step():
            look()


class _Driver:
    """Runs trials of a search in this process."""

    def __init__(self, plan: TrialPlan, data: Mapping[str, Any] | None, claims: Claims) -> None:
        self._plan, self._data, self._claims = plan, data, claims
        self._grid = list_grid_points(plan.spaces) if plan.by == "grid" else None
        with claims.lock_choice():
            self._study = plan.open_study()

    def step(self) -> bool:
        """Runs a trial, or waits shortly if other drivers run the last trials. Returns whether all
        trials have ended.
        """
        with self._claims.lock_choice():
            self._take_over()
            place = journal.find_next_place(self._study, self._plan.trial_count)
            trial = self._begin(place) if place is not None else None
            if trial is None and not journal.get_running_trials(self._study):
                return True
        if trial is None:
            time.sleep(_TICK_S)
        else:
            self._run_trial(*trial)
        return False

    def _begin(self, place: int) -> tuple[optuna.Trial, dict[str, Any]]:
        plan, point = self._plan, self._grid[place] if self._grid is not None else None
        trial = journal.begin_trial(
            self._study, plan.by, plan.seed, place, self._claims.driver, point
        )
        return trial, {key: space.ask(trial, key) for key, space in plan.spaces.items()}

    def _take_over(self) -> None:
        """Ends the trials of killed drivers. A trial whose run is not finished is queued again."""
        for trial in journal.get_running_trials(self._study):
            if self._claims.is_running(trial.user_attrs.get(journal.DRIVER)):
                continue
            value = self._read_objective(trial)
            if value is not None:
                self._study.tell(trial.number, value)
            else:
                journal.requeue_trial(self._study, trial, self._plan.spaces)

    def _read_objective(self, trial: FrozenTrial) -> float | None:
        """Returns the objective of a killed driver's trial if its run is finished. Otherwise
        removes the folder of the run, and returns None.
        """
        name = trial.user_attrs.get(journal.RUN)
        # An edited journal must not cause another folder to be removed.
        if name is None or not PLAIN_NAME.fullmatch(name):
            return None
        folder = self._plan.folder / RUNS / name
        if (folder / "summary.json").exists():
            return self._get_objective(Run.load(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def _get_objective(self, run: Run) -> float | None:
        value = run.metrics.get("validation", {}).get(self._plan.metric)
        return value if value is not None and math.isfinite(value) else None

    def _run_trial(self, trial: optuna.Trial, values: Mapping[str, Any]) -> None:
        """Makes the run of a trial, and writes its result or error into the journal."""
        import optuna
        from optuna.trial import TrialState

        plan = self._plan
        try:
            run = carry_out(
                plan.recipe.replace(values),
                self._data,
                partial(_make_recorded_run, trial, plan.metric),
                baseline=None,
                out=plan.folder / RUNS,
            )
            value = self._get_objective(run)
            if value is None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"the run has no finite validation {plan.metric}. Choose another objective, "
                    "or correct the recipe.",
                )
        except optuna.TrialPruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        except UnwritableError:
            # The disk is full: the trial stays unended, and a later call repeats it.
            raise
        except VflError as error:
            trial.set_user_attr(journal.ERROR, str(error))
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def _make_recorded_run(trial: optuna.Trial, metric: str, order: Order) -> None:
    """Writes the folder of a run into the journal, and makes the run."""
    trial.set_user_attr(journal.RUN, order.folder.name)
    in_process(True, _make_pruning_callback(trial, metric), order)


def _make_pruning_callback(trial: optuna.Trial, metric: str) -> OnRound:
    """Returns a callback that reports each round's metric to Optuna, and ends a pruned run."""
    import optuna

    reported: set[tuple[str, int]] = set()

    def report_round(finished: Round) -> None:
        value = finished.metrics.get("validation", {}).get(metric)
        # A phase with one round, such as evaluate, cannot be pruned.
        place = finished.phase, finished.round
        if value is None or finished.rounds == 1 or place in reported:
            return
        trial.report(value, len(reported))
        reported.add(place)
        if trial.should_prune():
            raise optuna.TrialPruned

    return report_round


_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


# its trials and the best trial. Writes its table and figures.
@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    Args:
        values: {key of the recipe: value that the trial used}.
        state: ``finished``, ``pruned`` or ``failed``.
        value: The objective; None unless the trial finished.
        rounds: The number of rounds whose objective was compared with other trials.
        error: The error message of a failed trial.
    """

    values: dict[str, Any]
    state: str
    value: float | None
    rounds: int
    error: str | None


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Args:
        objective: The metric that was optimized, such as ``validation auc``.
        trials: All trials that have ended.
        best: {key of the recipe: value} of the best trial.
        value: The objective of the best trial.
        run: The run of the best trial. Its test rows were not used for the choice.
        folder: The folder with the table and the figures of the search.
    """

    objective: str
    trials: tuple[Trial, ...]
    best: dict[str, Any]
    value: float
    run: Run
    folder: Path

    @property
    def test(self) -> dict[str, float]:
        """The metrics of the best run on the test rows."""
        return self.run.metrics.get("test", {})

    def columns(self) -> dict[str, list[Any]]:
        """Returns a table with a row for each trial, as {column: values}. The columns are the keys
        of the recipe, ``state``, the objective, ``rounds`` and ``error``.
        """
        keys = dict.fromkeys(key for trial in self.trials for key in trial.values)
        return {
            **{key: [trial.values.get(key) for trial in self.trials] for key in keys},
            "state": [trial.state for trial in self.trials],
            self.objective: [trial.value for trial in self.trials],
            "rounds": [trial.rounds for trial in self.trials],
            "error": [trial.error for trial in self.trials],
        }

    def __repr__(self) -> str:
        counts = [
            f"{sum(trial.state == state for trial in self.trials)} {state}"
            for state in ("finished", "pruned", "failed")
        ]
        return f"Search({', '.join(counts)}; {self.objective} {self.value:.4g} with {self.best})"


def read_result(plan: TrialPlan) -> Search:
    """Reads the trials from the journal of a search, and writes its table and figures. Raises
    VflError if no trial finished.
    """
    with Claims(plan.folder) as claims, claims.lock_choice():
        study = plan.open_study()
        trials = tuple(
            convert_trial(trial, plan.spaces) for trial in journal.get_ended_trials(study)
        )
        if not any(trial.state == "finished" for trial in trials):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{plan.folder}: no run of the search finished (first error: "
                f"{next((trial.error for trial in trials if trial.error), '')}). Correct the "
                "recipe or the spaces.",
            )
        best = _find_best(study)
        run = Run.load(plan.folder / RUNS / best.user_attrs[journal.RUN])
        value = float(best.value or 0.0)
        values = convert_trial(best, plan.spaces).values
        result = Search(plan.objective, trials, values, value, run, plan.folder)
        _write(result, plan, _compute_importance(study, trials))
    return result


def convert_trial(trial: FrozenTrial, spaces: Mapping[str, Space]) -> Trial:
    """Converts an ended trial of the journal to a ``Trial``."""
    values = {}
    for key in (key for key in spaces if key in trial.params):
        space, label = spaces[key], trial.params[key]
        values[key] = (
            label if isinstance(space, Between) else space.values[space.labels.index(label)]
        )
    state = _STATES[trial.state.name]
    value = trial.value if state == "finished" else None
    error = trial.user_attrs.get(journal.ERROR)
    return Trial(values, state, value, len(trial.intermediate_values), error)


def _find_best(study: optuna.Study) -> FrozenTrial:
    """Returns the best finished trial. Of equally good trials, the earliest is returned."""
    import optuna

    sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
    ended = [trial for trial in journal.get_ended_trials(study) if trial.value is not None]
    ended = [trial for trial in ended if trial.state == optuna.trial.TrialState.COMPLETE]
    return min(ended, key=lambda trial: sign * (trial.value or 0.0))


def _compute_importance(study: optuna.Study, trials: tuple[Trial, ...]) -> dict[str, float]:
    """Returns {key: share of the objective's variance}; empty if the objective is constant."""
    import optuna

    if len({trial.value for trial in trials if trial.value is not None}) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _write(result: Search, plan: TrialPlan, importance: Mapping[str, float]) -> None:
    """Writes the table of trials, the data for the page of the search, and both figures."""
    text, columns = io.StringIO(), result.columns()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    folder, spaces = result.folder, write_spaces(plan.spaces)
    write_atomic(folder / "trials.csv", text.getvalue())
    record = {
        "name": plan.recipe.name,
        "objective": result.objective,
        "by": plan.by,
        "spaces": spaces,
        "trials": [asdict(trial) for trial in result.trials],
        "best": result.best,
        "value": result.value,
        "run": result.run.folder.name,
        "test": result.test,
        "importance": dict(importance),
    }
    write_atomic(folder / SEARCH, json.dumps(record, indent=1) + "\n")
    points = [(trial.values, trial.value) for trial in result.trials if trial.value is not None]
    _draw(folder, spaces, points, result.objective, importance)


def _draw(
    folder: Path,
    spaces: Mapping[str, Any],
    points: Sequence[tuple[Mapping[str, Any], float]],
    objective: str,
    importance: Mapping[str, float],
) -> None:
    """Draws the values of the finished trials as parallel coordinates, and the importance of each
    key.
    """
    from vfl.summary.picture import NotebookFigure, save, style
    from vfl_lab.report import many_runs as several

    figure = NotebookFigure(several.compute_width(spaces), 4.2)
    several.draw_parallel(figure.subplots(), spaces, points, objective)
    save(figure, folder / "parallel.png")
    if importance:
        figure = NotebookFigure(6.4, 1.4 + 0.4 * len(importance))
        axes = figure.subplots()
        several.draw_importance(axes, importance)
        style(axes)
        save(figure, folder / "importance.png")
