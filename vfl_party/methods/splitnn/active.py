"""The active side: embeddings in, one joint loss, their gradients out."""

from __future__ import annotations

from typing import Any

import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.dcor import with_labels
from vfl_party.methods.splitnn.drift import Drift
from vfl_party.methods.splitnn.exchanges import BEST, STOP, VERDICT, embedding, validation
from vfl_party.methods.splitnn.local import ActiveLocal
from vfl_party.methods.splitnn.row_facts import OF_CLASS, told
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.methods.splitnn.without_passives import Absent
from vfl_party.models import Combined
from vfl_party.models.backward import backward
from vfl_party.models.metrics import evaluate, loss_fn, lower_is_better
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import chunks, joint_embeddings, outputs_of


class ActiveSplitNN(Phase):
    """One round is ``validate_every`` epochs, or ``checkpoint_steps`` steps of them."""

    def __init__(self, party: Party, name: str, settings: SplitNNSettings) -> None:
        self._party, self._settings = party, settings
        self._training = OwnTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        width = party.embedding_size
        self._embedding = party.answering(name, embedding(settings), width=width)
        self._validation = party.answering(name, validation(settings), width=width)
        self._verdicts = (
            party.answering(name, VERDICT) if settings.early_stopping is not None else None
        )
        self._loss = loss_fn(party.recipe.task)
        if settings.dcor and OF_CLASS in self._embedding.chains.down.knows:
            text = (
                f"recipe: phases: {name}: dcor tells the labels in a gradient that the "
                "transform label_dp does not"
            )
            raise InputError(
                Code.CONFIG_INVALID,
                f"{text} cover, so its epsilon would not hold; remove one of them",
            )
        self._absent = Absent(party, name, settings) if settings.late_policy != "wait" else None
        self.lenient = self._absent is not None
        self._local = ActiveLocal(party, settings, self._training) if settings.local else None
        self._drift = Drift(party.name)
        # It looks at training steps if there is no validation to compare; with ``mid`` two draws
        # always differ.
        self._watches = len(party.rows("validation")) == 0 and not settings.mid
        # With early stopping: value, round, metrics.
        self._best: dict[str, Any] | None = None
        rule, task = settings.early_stopping, party.recipe.task
        if rule is not None and rule.metric not in task.all_metrics:
            text = (
                f"recipe: phases: {name}: early_stopping.metric: a {task.kind} task has no "
                f"{rule.metric}"
            )
            text = f"{text} (it has {', '.join(task.all_metrics)})"
            raise InputError(Code.CONFIG_INVALID, text)
        if rule is not None and len(party.rows("validation")) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"phases: {name}: early_stopping needs validation rows; set "
                "rows.validation, or data.split",
            )

    def run_round(self, round_: int) -> RoundReport:
        party, training, rule = self._party, self._training, self._party.recipe.model.combine
        _, targets = party.need_labels()
        training.train_mode()
        batches = training.batches.planned(round_)
        steps, exchange = len(batches), 0
        total = torch.zeros((), device=party.device)
        absent = self._absent
        for batch, planned in enumerate(batches):
            training.zero_grad()
            swapped = []
            for rows in planned.parts:
                step = StepKey(self.name, round_, exchange)
                y_B = party.take(targets, rows)
                own = (
                    [party.encode(*party.features.inputs(rows))]
                    if party.features is not None
                    else []
                )
                lenience = absent.lenience if absent is not None else None
                received = self._embedding.collect(step, lenience=lenience, rows=len(rows))
                if absent is not None:
                    absent.all_here()
                z_BD = {name: tensors["z"] for name, tensors in received.items()}
                there = (
                    [*own, *z_BD.values()] if absent is None else absent.fill(step, rows, own, z_BD)
                )
                combined = Combined(rule, there, z_BD)
                outputs = party.outputs(combined.value)
                loss = self._loss(outputs, y_B)
                share = len(rows) / len(planned.rows)
                beside = told(
                    self._embedding.chains.down, party.recipe.task, combined, outputs, y_B, share
                )
                # The parts' losses add to the mean over the batch.
                if len(planned.parts) > 1:
                    loss = loss * share
                backward(loss)
                # The parties proceed while the top model is updated: each gradient is of the
                # weights before the update.
                dz_BD = combined.gradients()
                if self._settings.dcor:
                    dz_BD = with_labels(dz_BD, z_BD, y_B, self._settings.dcor)
                self._embedding.reply(
                    step, {name: {"dz": dz} for name, dz in dz_BD.items()}, beside
                )
                if self._watches:
                    self._drift.batch(own, z_BD)
                swapped.append((z_BD, dz_BD))
                total += loss.detach()
                exchange += 1
            training.step()
            if self._local is not None:
                self._local.update(planned.rows, swapped)
            if planned.last:
                training.end_epoch()
            party.tick(self.name, round_, self.rounds, batch + 1, steps)
        metrics = {"train": {"loss": total.item() / max(1, steps)}}
        validates = training.batches.validates(round_)
        after = self._validate(round_, exchange, metrics) if validates else exchange
        moved = self._drift.moved() if validates and not self._settings.mid else {}
        if absent is not None:
            return RoundReport(
                steps, metrics, note=absent.words(round_, steps), absences=absent.found, drift=moved
            )
        if not validates:
            return RoundReport(steps, metrics)
        stop = self._verdict(round_, after, metrics)
        if (
            self._best is None
            or not (stop or round_ + 1 == self.rounds)
            or self._best["round"] == round_
        ):
            return RoundReport(steps, metrics, done=stop, drift=moved)
        kept = f"keeps the weights of round {self._best['round'] + 1}"
        note = (
            f"{self.name} {'stops early after' if stop else 'ends with'} round {round_ + 1} "
            f"and {kept}"
        )
        return RoundReport(
            steps, metrics, done=stop, kept=self._best["metrics"], note=note, drift=moved
        )

    def _validate(self, round_: int, batch: int, metrics: dict[str, dict[str, float]]) -> int:
        party = self._party
        rows = party.rows("validation")
        lenience = self._absent.lenience if self._absent is not None else None
        policy = self._settings.late_policy
        found = joint_embeddings(party, self._validation, round_, batch, rows, lenience)
        outputs = outputs_of(party, self._drift.chunks(found), policy)
        if len(rows):
            labels, targets = party.need_labels()
            metrics["validation"] = evaluate(
                party.recipe.task, outputs, party.take(targets, rows), labels.unscale
            )
        return batch + len(chunks(rows))

    def _verdict(self, round_: int, batch: int, metrics: dict[str, dict[str, float]]) -> bool:
        """Decides whether this round is the best so far and whether to stop, and tells the passive
        parties.
        """
        rule = self._settings.early_stopping
        if rule is None or self._verdicts is None:
            return False
        value = metrics["validation"].get(rule.metric)
        if value is None:
            names = ", ".join(metrics["validation"])
            text = (
                f"phases: {self.name}: early_stopping.metric: this task has no {rule.metric} "
                f"(it has {names})"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        best, falls = self._best, lower_is_better(self._party.recipe.task, rule.metric)
        if best is None or (value < best["value"] if falls else value > best["value"]):
            best = self._best = {"value": value, "round": round_, "metrics": metrics}
            self._training.keep_as_best()
        validations = self._training.batches.validations
        stop = bool(validations(round_) - validations(best["round"]) >= rule.patience)
        verdict = (BEST if best["round"] == round_ else 0) | (STOP if stop else 0)
        step = StepKey(self.name, round_, batch)
        parties = self._verdicts.collect(step)
        self._verdicts.reply_all(
            step, parties, {"verdict": torch.tensor([verdict], dtype=torch.uint8)}
        )
        return stop

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        return self._training.rows_at(exchange, step)

    def state(self) -> Tree:
        absent = self._absent.state() if self._absent is not None else None
        local = self._local.state() if self._local is not None else {}
        watched = {"drift": self._drift.state()}
        return (
            self._training.state() | {"best_epoch": self._best, "absent": absent} | watched | local
        )

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
        self._best = tree["best_epoch"]
        # A checkpoint of an earlier version has none.
        if "drift" in tree:
            self._drift.load_state(tree["drift"])
        if self._local is not None:
            self._local.load_state(tree)
        if self._absent is not None:
            self._absent.load_state(tree["absent"])

    def finish(self) -> None:
        self._training.restore_best()
