"""Both sides of the phase. A passive party sends embeddings of the common rows once and is then
idle; if no phase follows, it may leave. The active party computes the outputs of the joint model
once, and then trains a model on its own columns with them.
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
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.methods.student.training import (
    Learner,
    Student,
    TeacherAnswers,
    count_epochs,
    count_rounds,
)
from vfl_party.models import combine
from vfl_party.models.metrics import lower_is_better
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import (
    SOLO,
    SoloScorer,
    SplitScorer,
    scoring,
    scoring_traffic,
    split_into_chunks,
)
from vfl_party.phases.stopping import check_stopping

# The message that a checkpoint of the active party contains the outputs, so passive parties may
# leave.
KEPT = Exchange("kept", NOTHING, NOTHING, when="once")


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of embeddings, with the noise of the earlier phases."""
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


def get_asked_rows(party: Party, settings: StudentSettings) -> dict[str, Rows]:
    """Returns {name: rows} for the rows that the joint model scores, in order: the aligned rows
    and, if ``together`` is set, the rows of the splits.
    """
    more = settings.splits if settings.together else ()
    return {"aligned": party.rows.get("aligned")} | {split: party.rows.get(split) for split in more}


def get_kept_step(party: Party, phase: str, settings: StudentSettings) -> StepKey:
    """Returns the step of ``KEPT``, which is the step after the embeddings."""
    steps = sum(len(split_into_chunks(rows)) for rows in get_asked_rows(party, settings).values())
    return StepKey(phase, ASK, steps)


def traffic(party: Party, phase: str, settings: StudentSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    exchange, step, occurrences = embeddings(party), 0, list[Occurrence]()
    for rows in get_asked_rows(party, settings).values():
        occurrences += scoring_traffic(party, phase, exchange, ASK, step, rows)
        step += len(split_into_chunks(rows))
    return Traffic([*occurrences, Occurrence.of(KEPT, get_kept_step(party, phase, settings))])


# The names of the evaluated models in the metrics: the student, a model without a teacher, the
# joint model.
STUDENT, ALONE, TOGETHER = "student", "alone", "together"


class ActiveStudent(Phase):
    """Collects embeddings in the first round. Each other round is ``validate_every`` local
    epochs.
    """

    alone_from = ASK + 1

    def __init__(self, party: Party, name: str, settings: StudentSettings) -> None:
        _check(party, name, settings)
        self.name, self.rounds = name, count_rounds(party, settings)
        self.epochs = count_epochs(party, settings)
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._kept = party.exchanges.open_answering(name, KEPT)
        # Whether the passive parties still wait for the message that a checkpoint contains the
        # outputs.
        self._owes_acknowledgement = False
        self._answers: TeacherAnswers | None = None
        # {split: the joint model's outputs [N, O]}.
        self._joint_outputs: dict[str, Tensor] = {}
        own_rows = party.rows.data.splits.get("own", np.empty(0, np.int64))
        labelled = np.union1d(party.rows.get("train"), own_rows)
        student = party.models[SOLO]
        assert isinstance(student, Student)  # noqa: S101 - the method has made it
        rows = np.union1d(party.rows.get("aligned"), own_rows)
        self._learners = {STUDENT: Learner(party, name, settings, student, rows, labelled)}
        if settings.alone:
            model, passes = copy.deepcopy(student), -(-len(rows) // len(labelled))
            self._learners[ALONE] = Learner(
                party, name, settings, model, labelled, labelled, passes=passes
            )

    def run_round(self, round_: int) -> RoundReport:
        if round_ == ASK:
            return self._collect_outputs()
        self._acknowledge()
        metrics: dict[str, dict[str, float]] = {}
        steps, tick = (
            0,
            self._party.hooks.make_ticker(
                self.name, round_, self.rounds, self._count_epochs_left()
            ),
        )
        for name, learner in self._learners.items():
            if learner.has_ended:
                continue
            num_steps, loss = learner.run(tick)
            steps += num_steps
            metrics[f"train {name}"] = {"loss": loss}
            validation = self._measure(name, ("validation",))
            metrics |= validation
            if validation:
                learner.record_validation(validation[f"validation {name}"])
        if all(learner.has_ended for learner in self._learners.values()):
            return self._finish_phase(steps, metrics)
        return RoundReport(steps, metrics, judged=self._judged)

    @property
    def _judged(self) -> str:
        rule = self._settings.early_stopping
        return rule.metric if rule is not None else ""

    def _count_epochs_left(self) -> int:
        """Returns the maximum number of epochs in the round, over all models."""
        epochs = self._settings.validate_every
        return sum(not learner.has_ended for learner in self._learners.values()) * epochs

    @torch.no_grad()
    def _collect_outputs(self) -> RoundReport:
        """Computes the outputs of the joint model for the rows that all parties hold, once."""
        party, step = self._party, StepKey(self.name, ASK, 0)
        for name, rows in get_asked_rows(party, self._settings).items():
            chunks = [*self._scorer.embeddings(rows, step)]
            step = StepKey(step.phase, ASK, step.batch + len(chunks))
            outputs = self._scorer.scored(chunks).outputs
            if name != "aligned":
                self._joint_outputs[name] = outputs
                continue
            joint_ND: Tensor | None = None
            if self._settings.match:
                rule = party.recipe.model.combine
                embeddings_by_chunk = [
                    [*chunk.own, *(z for z in chunk.others.values() if z is not None)]
                    for chunk in chunks
                ]
                joint_ND = torch.cat(
                    [combine(rule, chunk_embeddings) for chunk_embeddings in embeddings_by_chunk]
                )
            self._answers = TeacherAnswers(rows, outputs, joint_ND)
        self._set_teacher()
        self._owes_acknowledgement = True
        return RoundReport(0, checkpoint=True)

    def _set_teacher(self) -> None:
        self._learners[STUDENT].answers = self._answers

    def _acknowledge(self) -> None:
        """Tells the passive parties that a checkpoint contains the outputs, so that they may
        leave.
        """
        # Nothing is owed if this generation began after the outputs were collected.
        if not self._owes_acknowledgement:
            return
        self._owes_acknowledgement, step = (
            False,
            get_kept_step(self._party, self.name, self._settings),
        )
        self._kept.acknowledge(step, self._kept.collect(step))

    def _finish_phase(self, steps: int, metrics: dict[str, dict[str, float]]) -> RoundReport:
        """Ends the phase: evaluates all models with their best weights."""
        epochs = {
            model_name: learner.restore_best() for model_name, learner in self._learners.items()
        }
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        outputs_by_model = {STUDENT: self._compute_outputs(STUDENT)} | (
            {ALONE: self._compute_outputs(ALONE)} if ALONE in self._learners else {}
        )
        if self._settings.together:
            outputs_by_model[TOGETHER] = {
                split: (self._party.rows.get(split), y) for split, y in self._joint_outputs.items()
            }
        for model_name, outputs in outputs_by_model.items():
            predictions |= {
                f"{split} {model_name}": result
                for split, result in outputs.items()
                if len(result[0])
            }
        metrics |= compute_metrics(self._party, predictions)
        note = self._make_note(epochs, metrics)
        return RoundReport(
            steps, metrics, done=True, note=note, predictions=predictions, judged=self._judged
        )

    def _compute_outputs(
        self, model_name: str, splits: tuple[str, ...] | None = None
    ) -> dict[str, tuple[Rows, Tensor]]:
        """Returns {split: (the split's rows, the outputs of a model for these rows)}."""
        scorer = SoloScorer(self._party, self._learners[model_name].model)
        rows = {split: self._party.rows.get(split) for split in splits or self._settings.splits}
        return {
            split: (split_rows, scorer.outputs(split_rows)) for split, split_rows in rows.items()
        }

    def _measure(self, model_name: str, splits: tuple[str, ...]) -> dict[str, dict[str, float]]:
        predictions = {
            f"{split} {model_name}": result
            for split, result in self._compute_outputs(model_name, splits).items()
        }
        return compute_metrics(self._party, predictions)

    def _make_note(
        self, epochs: Mapping[str, int], metrics: Mapping[str, Mapping[str, float]]
    ) -> str:
        """Returns a note on the epochs of the models' best weights, and on the share of the gap to
        the joint model that the student closes.
        """
        best_epochs = [f"{model_name} {count}" for model_name, count in epochs.items()]
        note = f"{self.name} keeps the weights after epochs: {', '.join(best_epochs)}"
        test_metrics = [
            metrics.get(f"test {model_name}", {}) for model_name in (ALONE, STUDENT, TOGETHER)
        ]
        if not all(test_metrics):
            return note
        metric_name = next(
            (metric for metric in ("auc", "accuracy", "rmse") if metric in test_metrics[0]), "loss"
        )
        alone, student, together = (model_metrics[metric_name] for model_metrics in test_metrics)
        task = self._party.recipe.task
        gap = (alone - together) if lower_is_better(task, metric_name) else (together - alone)
        gain = (alone - student) if lower_is_better(task, metric_name) else (student - alone)
        closed_note = (
            ""
            if gap <= 0
            else f": the student closes {gain / gap * 100:.0f} % of the gap"
            if gain > 0
            else ": the student closes no gap"
        )
        return (
            f"{note}; test {metric_name}: alone {alone:.4g}, student {student:.4g}, together "
            f"{together:.4g}{closed_note}"
        )

    def state(self) -> Tree:
        answers = self._answers
        alone = self._learners.get(ALONE)
        return {
            "outputs": None if answers is None else answers.outputs,
            "joint": None if answers is None else answers.joint,
            "together": self._joint_outputs,
            "learners": {who: learner.state() for who, learner in self._learners.items()},
            "alone": None if alone is None else dict(alone.model.state_dict()),
        }

    def load_state(self, tree: Tree) -> None:
        device = self._party.device
        if tree["outputs"] is not None:
            joint = tree["joint"]
            joint = None if joint is None else joint.to(device)
            rows = self._party.rows.get("aligned")
            self._answers = TeacherAnswers(rows, tree["outputs"].to(device), joint)
            self._set_teacher()
        self._joint_outputs = {
            split: outputs.to(device) for split, outputs in tree["together"].items()
        }
        for who, state in tree["learners"].items():
            self._learners[who].load_state(state)
        if tree["alone"] is not None:
            self._learners[ALONE].model.load_state_dict(tree["alone"])


def _check(party: Party, name: str, settings: StudentSettings) -> None:
    """Raises InputError if no earlier phase trains a teacher, or if the student cannot be
    trained.
    """
    where = f"recipe: phases: {name}"
    phases = party.course.phases
    position = next(place for place, listed in enumerate(phases) if listed.name == name)
    if not any(earlier.facts.follows is not None for earlier in phases[:position]):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: no earlier phase trains the joint model that is the teacher. Put splitnn, "
            "head or fedcvt before this phase.",
        )
    if any(earlier.kind == phases[position].kind for earlier in phases[:position]):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: a run keeps one student, which an earlier phase trains. Remove one of the "
            "phases.",
        )
    if party.rows.features is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {party.name} has no features, so it cannot predict alone. Remove the phase.",
        )
    if len(party.rows.get("train")) == 0:
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


class PassiveStudent(Phase):
    """Sends embeddings in the first round. Its models do not change."""

    alone_from = ASK + 1

    def __init__(self, party: Party, name: str, settings: StudentSettings) -> None:
        self.name, self.rounds = name, count_rounds(party, settings)
        self.epochs = count_epochs(party, settings)
        self.skippable = tuple(range(self.rounds))
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._kept = party.exchanges.open_asking(name, KEPT)

    def run_round(self, round_: int) -> RoundReport:
        if round_ != ASK:
            return RoundReport(0)
        step = StepKey(self.name, ASK, 0)
        for rows in get_asked_rows(self._party, self._settings).values():
            num_steps = self._scorer.answer(rows, step)
            step = StepKey(step.phase, ASK, step.batch + num_steps)
        self._kept.swap(get_kept_step(self._party, self.name, self._settings), {})
        return RoundReport(0, checkpoint=True)
