"""The result of a search: its trials, the best one, its table and its figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.run import Run
from vfl.searching import journal
from vfl.searching.claims import Claims
from vfl.searching.spaces import Between, Space, write_spaces
from vfl.searching.trying import RUNS, TrialPlan
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.run_folder import SEARCH

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class Trial:
    """One trial.

    ``state``: ``finished``, ``pruned`` or ``failed``. ``value``: the objective; None unless the
    trial finished. ``rounds``: those that were compared with other trials. ``error``: why it
    failed.
    """

    values: dict[str, Any]
    state: str
    value: float | None
    rounds: int
    error: str | None


@dataclass(frozen=True)
class Search:
    """A finished search.

    ``best``: the chosen values; ``value``: their objective; ``run``: the run with these values,
    whose test rows had no part in the choice; ``folder``: the folder with the figures.
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
        """Returns one row for each trial, as columns: the keys, ``state``, the objective,
        ``rounds``, ``error``.
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
    """Reads the trials of the journal, and writes the table and the figures. Raises VflError if no
    trial finished.
    """
    with Claims(plan.folder) as claims, claims.choosing():
        study = plan.open_study()
        trials = tuple(trial_of(trial, plan.spaces) for trial in journal.get_ended_trials(study))
        if not any(trial.state == "finished" for trial in trials):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{plan.folder}: no run of the search finished (first error: "
                f"{next((trial.error for trial in trials if trial.error), '')}). Correct the "
                "recipe or the spaces.",
            )
        best = _best(study)
        run = Run.load(plan.folder / RUNS / best.user_attrs[journal.RUN])
        value = float(best.value or 0.0)
        values = trial_of(best, plan.spaces).values
        made = Search(plan.objective, trials, values, value, run, plan.folder)
        _write(made, plan, _importance(study, trials))
    return made


def trial_of(trial: FrozenTrial, spaces: Mapping[str, Space]) -> Trial:
    """Converts a trial of the journal that has ended."""
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


def _best(study: optuna.Study) -> FrozenTrial:
    """Returns the best finished trial; of equal ones, the one with the first place."""
    import optuna

    sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
    ended = [trial for trial in journal.get_ended_trials(study) if trial.value is not None]
    ended = [trial for trial in ended if trial.state == optuna.trial.TrialState.COMPLETE]
    return min(ended, key=lambda trial: sign * (trial.value or 0.0))


def _importance(study: optuna.Study, trials: tuple[Trial, ...]) -> dict[str, float]:
    """Returns {key: its share of the objective's variance}; empty if the objective is constant."""
    import optuna

    if len({trial.value for trial in trials if trial.value is not None}) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _write(made: Search, plan: TrialPlan, importance: Mapping[str, float]) -> None:
    """Writes the trials as a table, the data of a page, and both figures."""
    text, columns = io.StringIO(), made.columns()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    folder, spaces = made.folder, write_spaces(plan.spaces)
    write_atomic(folder / "trials.csv", text.getvalue())
    record = {
        "name": plan.recipe.name,
        "objective": made.objective,
        "by": plan.by,
        "spaces": spaces,
        "trials": [asdict(trial) for trial in made.trials],
        "best": made.best,
        "value": made.value,
        "run": made.run.folder.name,
        "test": made.test,
        "importance": dict(importance),
    }
    write_atomic(folder / SEARCH, json.dumps(record, indent=1) + "\n")
    tried = [(trial.values, trial.value) for trial in made.trials if trial.value is not None]
    _draw(folder, spaces, tried, made.objective, importance)


def _draw(
    folder: Path,
    spaces: Mapping[str, Any],
    tried: Sequence[tuple[Mapping[str, Any], float]],
    objective: str,
    importance: Mapping[str, float],
) -> None:
    """Draws the finished trials as lines over the keys, and how much each key matters."""
    from vfl.report.page import search_page
    from vfl.report.picture import NotebookFigure, save, style

    figure = NotebookFigure(search_page.width_of(spaces), 4.2)
    search_page.parallel(figure.subplots(), spaces, tried, objective)
    save(figure, folder / "parallel.png")
    if importance:
        figure = NotebookFigure(6.4, 1.4 + 0.4 * len(importance))
        axes = figure.subplots()
        search_page.importance(axes, importance)
        style(axes)
        save(figure, folder / "importance.png")
