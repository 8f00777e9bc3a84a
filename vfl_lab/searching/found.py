"""Reads the result of a search: its trials and the best trial. Writes its table and figures."""

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
from vfl_lab.searching.claims import Claims
from vfl_lab.searching.spaces import Between, Space, write_spaces
from vfl_lab.searching.trying import RUNS, TrialPlan

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


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
    from vfl_lab.report.page import search_page

    figure = NotebookFigure(search_page.compute_width(spaces), 4.2)
    search_page.draw_parallel(figure.subplots(), spaces, points, objective)
    save(figure, folder / "parallel.png")
    if importance:
        figure = NotebookFigure(6.4, 1.4 + 0.4 * len(importance))
        axes = figure.subplots()
        search_page.draw_importance(axes, importance)
        style(axes)
        save(figure, folder / "importance.png")
