"""Makes the trials of a search: a driver's work, which several may share."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.recipe import Recipe
from vfl.library.rounds import OnRound, Round
from vfl.library.run import Run
from vfl.library.simulate import Order, carry_out, in_process
from vfl.searching import journal
from vfl.searching.claims import Claims
from vfl.searching.spaces import Space, points
from vfl_common.errors import Code, InputError, UnwritableError, VflError
from vfl_common.files import PLAIN_NAME

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

# The interval at which an idle driver checks whether another one was lost.
_TICK_S = 0.2
RUNS = "runs"


@dataclass(frozen=True)
class TrialPlan:
    """A search, for its drivers. ``asked``: a digest of all that decides its trials; the other
    fields are the arguments of ``search``.
    """

    recipe: Recipe
    spaces: Mapping[str, Space]
    objective: str
    runs: int
    folder: Path
    by: journal.By
    prune: bool
    seed: int
    asked: str

    @property
    def metric(self) -> str:
        """The objective's metric."""
        return self.objective.partition(" ")[2]

    @property
    def every(self) -> int:
        """The number of trials: a grid has no more than its points."""
        return min(self.runs, len(points(self.spaces))) if self.by == "grid" else self.runs

    def open_study(self) -> optuna.Study:
        """Opens the journal. Raises InputError if it is of another search."""
        from vfl_party.models.metrics import lower_is_better

        lower = lower_is_better(self.recipe.settings.task, self.metric)
        return journal.open_study(
            self.folder, self.asked, self.spaces, lower=lower, prune=self.prune
        )


def drive(
    plan: TrialPlan, data: Mapping[str, Any] | None, look: Callable[[], None] = lambda: None
) -> None:
    """Makes trials until all have ended, including those of other drivers. ``data``: as in
    ``simulate``; ``look``: called when a trial has ended. Raises InputError.
    """
    with Claims(plan.folder) as claims:
        driver = _Driver(plan, data, claims)
        while not driver.step():
            look()


class _Driver:
    def __init__(self, plan: TrialPlan, data: Mapping[str, Any] | None, claims: Claims) -> None:
        self._plan, self._data, self._claims = plan, data, claims
        self._grid = points(plan.spaces) if plan.by == "grid" else None
        with claims.choosing():
            self._study = plan.open_study()

    def step(self) -> bool:
        """Makes a trial, or waits a moment for those of others. Returns whether all have ended."""
        with self._claims.choosing():
            self._take_over()
            place = journal.next_place(self._study, self._plan.every)
            begun = self._begin(place) if place is not None else None
            if begun is None and not journal.running(self._study):
                return True
        if begun is None:
            time.sleep(_TICK_S)
        else:
            self._make(*begun)
        return False

    def _begin(self, place: int) -> tuple[optuna.Trial, dict[str, Any]]:
        plan, point = self._plan, self._grid[place] if self._grid is not None else None
        trial = journal.ask(self._study, plan.by, plan.seed, place, self._claims.own, point)
        return trial, {key: space.ask(trial, key) for key, space in plan.spaces.items()}

    def _take_over(self) -> None:
        """Ends the trials of killed drivers, and queues those whose run is not finished."""
        for trial in journal.running(self._study):
            if self._claims.works(trial.user_attrs.get(journal.DRIVER)):
                continue
            value = self._read_objective(trial)
            if value is not None:
                self._study.tell(trial.number, value)
            else:
                journal.begin_again(self._study, trial, self._plan.spaces)

    def _read_objective(self, trial: FrozenTrial) -> float | None:
        """Returns the objective of a trial whose driver was killed after the end of its run, or
        removes an unfinished run.
        """
        name = trial.user_attrs.get(journal.RUN)
        # A journal that was edited must not remove another folder.
        if name is None or not PLAIN_NAME.fullmatch(name):
            return None
        folder = self._plan.folder / RUNS / name
        if (folder / "summary.json").exists():
            return self._value(Run.load(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def _value(self, run: Run) -> float | None:
        value = run.metrics.get("validation", {}).get(self._plan.metric)
        return value if value is not None and math.isfinite(value) else None

    def _make(self, trial: optuna.Trial, values: Mapping[str, Any]) -> None:
        """Makes a trial's run, and records how it ended."""
        import optuna
        from optuna.trial import TrialState

        plan = self._plan
        try:
            run = carry_out(
                plan.recipe.replace(values),
                self._data,
                partial(_make_noted, trial, plan.metric),
                baseline=None,
                out=plan.folder / RUNS,
            )
            value = self._value(run)
            if value is None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"the run has no finite validation {plan.metric}. Choose another objective, "
                    "or correct the recipe.",
                )
        except optuna.TrialPruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        except UnwritableError:
            # The trial is repeated once there is room.
            raise
        except VflError as error:
            trial.set_user_attr(journal.ERROR, str(error))
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def _make_noted(trial: optuna.Trial, metric: str, order: Order) -> None:
    """Makes a run whose folder is in the journal before it begins."""
    trial.set_user_attr(journal.RUN, order.folder.name)
    in_process(True, _watching(trial, metric), order)


def _watching(trial: optuna.Trial, metric: str) -> OnRound:
    """Returns a function that reports the rounds of a run, and ends a run that is pruned."""
    import optuna

    seen: set[tuple[str, int]] = set()

    def watch(finished: Round) -> None:
        value = finished.metrics.get("validation", {}).get(metric)
        # The phase evaluate has one round, so there is nothing to prune.
        place = finished.phase, finished.round
        if value is None or finished.rounds == 1 or place in seen:
            return
        trial.report(value, len(seen))
        seen.add(place)
        if trial.should_prune():
            raise optuna.TrialPruned

    return watch
