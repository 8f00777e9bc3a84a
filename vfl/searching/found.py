"""What a search has found: its trials, the best one, its table and its pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.run import Run
from vfl.searching import journal
from vfl.searching.claims import Claims
from vfl.searching.spaces import Between, Space, written
from vfl.searching.trying import RUNS, Plan
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.run_folder import SEARCH

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


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


def found(plan: Plan) -> Search:
    """Reads the trials of the journal, and writes the table and the pictures. Raises VflError if
    no trial finished.
    """
    with Claims(plan.folder) as claims, claims.choosing():
        study = plan.opened()
        trials = tuple(trial_of(each, plan.spaces) for each in journal.ended(study))
        if not any(each.state == "finished" for each in trials):
            error = next((each.error for each in trials if each.error), "")
            text = f"{plan.folder}: no run of the search finished; the first error is: {error}"
            raise InputError(Code.CONFIG_INVALID, text)
        best = _best(study)
        run = Run.load(plan.folder / RUNS / best.user_attrs[journal.RUN])
        value = float(best.value or 0.0)
        values = trial_of(best, plan.spaces).values
        made = Search(plan.objective, trials, values, value, run, plan.folder)
        _write(made, plan, _importance(study, trials))
    return made


def trial_of(trial: FrozenTrial, spaces: Mapping[str, Space]) -> Trial:
    """Returns a trial of the journal that has ended."""
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
    """Returns the best finished trial; of equal ones that with the first place, whoever made it."""
    import optuna

    sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
    whole = [each for each in journal.ended(study) if each.value is not None]
    whole = [each for each in whole if each.state == optuna.trial.TrialState.COMPLETE]
    return min(whole, key=lambda each: sign * (each.value or 0.0))


def _importance(study: optuna.Study, trials: tuple[Trial, ...]) -> dict[str, float]:
    """Returns {key: its share of the objective's variance}; nothing if the objective does not
    vary.
    """
    import optuna

    if len({each.value for each in trials if each.value is not None}) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _write(made: Search, plan: Plan, importance: Mapping[str, float]) -> None:
    """Writes the trials as a table, all that a page needs, and both pictures."""
    from vfl.searching.draw import draw_importance, draw_parallel

    text, columns = io.StringIO(), made.columns()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    folder, spaces = made.folder, written(plan.spaces)
    write_atomic(folder / "trials.csv", text.getvalue())
    noted = {
        "name": plan.recipe.name,
        "objective": made.objective,
        "by": plan.by,
        "spaces": spaces,
        "trials": [asdict(each) for each in made.trials],
        "best": made.best,
        "value": made.value,
        "run": made.run.folder.name,
        "test": made.test,
        "importance": dict(importance),
    }
    write_atomic(folder / SEARCH, json.dumps(noted, indent=1) + "\n")
    tried = [(each.values, each.value) for each in made.trials if each.value is not None]
    draw_parallel(spaces, tried, made.objective, folder / "parallel.png")
    if importance:
        draw_importance(importance, folder / "importance.png")
