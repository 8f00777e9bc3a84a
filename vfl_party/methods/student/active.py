"""The active side: one pass of the joint model, whose outputs then teach a model on this party's
own columns.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.config.task import ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.student.exchanges import KEPT, embeddings, get_kept_step, rows_to_ask
from vfl_party.methods.student.model import Student
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.methods.student.training import Learner, TeacherAnswers, epochs_of, rounds_of
from vfl_party.models import combine
from vfl_party.models.metrics import lower_is_better
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import SOLO, SoloScorer, SplitScorer
from vfl_party.phases.stopping import check_stopping

# The evaluated models, as the metrics name them.
STUDENT, ALONE, TOGETHER = "student", "alone", "together"


class ActiveStudent(Phase):
    """The first round collects embeddings; each other round is ``validate_every`` local epochs."""

    alone_from = ASK + 1

    def __init__(self, party: Party, name: str, settings: StudentSettings) -> None:
        _check(party, name, settings)
        self.name, self.rounds = name, rounds_of(party, settings)
        self.epochs = epochs_of(party, settings)
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._kept = party.answering(name, KEPT)
        # Whether the others still wait for the message that a checkpoint contains the answers.
        self._owed = False
        self._answers: TeacherAnswers | None = None
        # {split: the joint model's outputs}.
        self._together: dict[str, Tensor] = {}
        own = party.data.splits.get("own", np.empty(0, np.int64))
        labelled = np.union1d(party.rows("train"), own)
        student = party.models[SOLO]
        assert isinstance(student, Student)  # noqa: S101 - the method has made it
        rows = np.union1d(party.rows("aligned"), own)
        self._learners = {STUDENT: Learner(party, name, settings, student, rows, labelled)}
        if settings.alone:
            model, passes = copy.deepcopy(student), -(-len(rows) // len(labelled))
            self._learners[ALONE] = Learner(
                party, name, settings, model, labelled, labelled, passes=passes
            )

    def run_round(self, round_: int) -> RoundReport:
        if round_ == ASK:
            return self._ask()
        self._acknowledge()
        metrics: dict[str, dict[str, float]] = {}
        steps, tick = (
            0,
            self._party.ticker(self.name, round_, self.rounds, self._count_epochs_left()),
        )
        for who, learner in self._learners.items():
            if learner.over:
                continue
            done, loss = learner.run(tick)
            steps += done
            metrics[f"train {who}"] = {"loss": loss}
            validation = self._measure(who, ("validation",))
            metrics |= validation
            if validation:
                learner.judge(validation[f"validation {who}"])
        if all(learner.over for learner in self._learners.values()):
            return self._end(steps, metrics)
        return RoundReport(steps, metrics, judged=self._judged)

    @property
    def _judged(self) -> str:
        rule = self._settings.early_stopping
        return rule.metric if rule is not None else ""

    def _count_epochs_left(self) -> int:
        """Returns the maximum number of epochs of all models in the round."""
        epochs = self._settings.validate_every
        return sum(not learner.over for learner in self._learners.values()) * epochs

    @torch.no_grad()
    def _ask(self) -> RoundReport:
        """Computes the outputs of the joint model, once, for the rows that all parties hold."""
        party, step = self._party, StepKey(self.name, ASK, 0)
        for name, rows in rows_to_ask(party, self._settings).items():
            chunks = [*self._scorer.embeddings(rows, step)]
            step = StepKey(step.phase, ASK, step.batch + len(chunks))
            outputs = self._scorer.scored(chunks).outputs
            if name != "aligned":
                self._together[name] = outputs
                continue
            joint: Tensor | None = None
            if self._settings.match:
                rule = party.recipe.model.combine
                all_BD = [
                    [*chunk.own, *(z for z in chunk.others.values() if z is not None)]
                    for chunk in chunks
                ]
                joint = torch.cat([combine(rule, row_BD) for row_BD in all_BD])
            self._answers = TeacherAnswers(rows, outputs, joint)
        self._teach()
        self._owed = True
        return RoundReport(0, checkpoint=True)

    def _teach(self) -> None:
        self._learners[STUDENT].answers = self._answers

    def _acknowledge(self) -> None:
        """Tells the others that a checkpoint contains the answers, after which they may leave."""
        # This generation began after the answers.
        if not self._owed:
            return
        self._owed, step = False, get_kept_step(self._party, self.name, self._settings)
        self._kept.acknowledge(step, self._kept.collect(step))

    def _end(self, steps: int, metrics: dict[str, dict[str, float]]) -> RoundReport:
        """Ends the phase: measures all models with their best weights."""
        epochs = {who: learner.restore_best() for who, learner in self._learners.items()}
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        names = {STUDENT: self._outputs(STUDENT)} | (
            {ALONE: self._outputs(ALONE)} if ALONE in self._learners else {}
        )
        if self._settings.together:
            names[TOGETHER] = {s: (self._party.rows(s), y) for s, y in self._together.items()}
        for who, outputs in names.items():
            predictions |= {f"{s} {who}": result for s, result in outputs.items() if len(result[0])}
        metrics |= compute_metrics(self._party, predictions)
        note = self._make_note(epochs, metrics)
        return RoundReport(
            steps, metrics, done=True, note=note, predictions=predictions, judged=self._judged
        )

    def _outputs(
        self, who: str, splits: tuple[str, ...] | None = None
    ) -> dict[str, tuple[Rows, Tensor]]:
        """Returns {split: (its rows, the outputs of a model for them)}."""
        scorer = SoloScorer(self._party, self._learners[who].model)
        rows = {split: self._party.rows(split) for split in splits or self._settings.splits}
        return {
            split: (split_rows, scorer.outputs(split_rows)) for split, split_rows in rows.items()
        }

    def _measure(self, who: str, splits: tuple[str, ...]) -> dict[str, dict[str, float]]:
        predictions = {
            f"{split} {who}": result for split, result in self._outputs(who, splits).items()
        }
        return compute_metrics(self._party, predictions)

    def _make_note(
        self, epochs: Mapping[str, int], metrics: Mapping[str, Mapping[str, float]]
    ) -> str:
        """Returns a note on the weights of the models, and on the gap that the student closes."""
        early = [f"{who} {count}" for who, count in epochs.items()]
        note = f"{self.name} keeps the weights after epochs: {', '.join(early)}"
        of = [metrics.get(f"test {who}", {}) for who in (ALONE, STUDENT, TOGETHER)]
        if not all(of):
            return note
        name = next((metric for metric in ("auc", "accuracy", "rmse") if metric in of[0]), "loss")
        alone, student, together = (model_metrics[name] for model_metrics in of)
        task = self._party.recipe.task
        gap = (alone - together) if lower_is_better(task, name) else (together - alone)
        gained = (alone - student) if lower_is_better(task, name) else (student - alone)
        closed = (
            ""
            if gap <= 0
            else f": the student closes {gained / gap * 100:.0f} % of the gap"
            if gained > 0
            else ": the student closes no gap"
        )
        return (
            f"{note}; test {name}: alone {alone:.4g}, student {student:.4g}, together "
            f"{together:.4g}{closed}"
        )

    def state(self) -> Tree:
        answers = self._answers
        alone = self._learners.get(ALONE)
        return {
            "outputs": None if answers is None else answers.outputs,
            "joint": None if answers is None else answers.joint,
            "together": self._together,
            "learners": {who: learner.state() for who, learner in self._learners.items()},
            "alone": None if alone is None else dict(alone.model.state_dict()),
        }

    def load_state(self, tree: Tree) -> None:
        device = self._party.device
        if tree["outputs"] is not None:
            joint = tree["joint"]
            joint = None if joint is None else joint.to(device)
            rows = self._party.rows("aligned")
            self._answers = TeacherAnswers(rows, tree["outputs"].to(device), joint)
            self._teach()
        self._together = {split: outputs.to(device) for split, outputs in tree["together"].items()}
        for who, state in tree["learners"].items():
            self._learners[who].load_state(state)
        if tree["alone"] is not None:
            self._learners[ALONE].model.load_state_dict(tree["alone"])


def _check(party: Party, name: str, settings: StudentSettings) -> None:
    """Raises InputError if there is no teacher, or if the student cannot be trained."""
    where = f"recipe: phases: {name}"
    phases = party.course.phases
    at = next(place for place, listed in enumerate(phases) if listed.name == name)
    if not any(earlier.method.follows(earlier.settings) is not None for earlier in phases[:at]):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: no earlier phase trains the joint model that is the teacher. Put splitnn, "
            "head or fedcvt before this phase.",
        )
    if any(earlier.kind == phases[at].kind for earlier in phases[:at]):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: a run keeps one student, which an earlier phase trains. Remove one of the "
            "phases.",
        )
    if party.features is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {party.name} has no features, so it cannot predict alone. Remove the phase.",
        )
    if len(party.rows("train")) == 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: there are no labelled training rows. Add rows with labels to the training "
            "split.",
        )
    if party.recipe.task.kind == "regression" and settings.temperature != 1.0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: temperature has no effect in a regression task (got "
            f"{settings.temperature:g}). Remove temperature.",
        )
    if isinstance(party.recipe.task.threshold, ThresholdRule):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: the rule in task.threshold chooses a threshold for the joint model, which "
            "does not fit the student. Set task.threshold to a number, or remove the phase.",
        )
    if settings.early_stopping is not None:
        check_stopping(party, name, settings.early_stopping)
