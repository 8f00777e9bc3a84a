"""Predictions of the active party without the passive parties.

The active party predicts alone if a passive party is unreachable or if the user asks for it. It
writes the scores of its own model, or a result without scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from vfl_common.bundle import PROTOCOL, Hub, Link
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError, LostError, VflError
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryPipe
from vfl_party.assembly.party import Load, OpenedParty, assemble, expect_rows, open_party
from vfl_party.assembly.party import load as load_rows
from vfl_party.base.step_timing import Clock
from vfl_party.data import Labels, Table
from vfl_party.phases.context import Hooks
from vfl_party.phases.scoring import SOLO
from vfl_party.predict.prediction import Prediction, TrainedRun, load_trained, prediction_data
from vfl_party.predict.results import (
    ALONE,
    EXPECTED,
    PARTIES,
    WAITING,
    Output,
    Predicted,
    id_names,
    label_name,
    list_all_rows,
    meaning,
    result_columns,
)


@dataclass(frozen=True)
class _NoConnections:
    """Implements ``vfl_party.outbound.exchange.Connections`` for a party that predicts alone."""

    hub: Hub | None
    link: Link | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    record: None = None


@dataclass(frozen=True)
class Alone:
    """A model that only the active party needs, and the rows to predict with it."""

    trained: TrainedRun
    opened: OpenedParty
    says_parties: bool = False
    expects: str = ""

    @classmethod
    def load(
        cls,
        run: Path,
        joint: TrainedRun,
        name: str,
        settings: DataSettings | None,
        source: str | None,
        query: str | None,
    ) -> Alone:
        """Loads a local-only baseline or a run with a student, and reads the rows to predict.

        Args:
            run: The folder of the baseline's run, or of the run with a student.
            joint: The run that was trained with the passive parties.
            name: The name of the active party.
            settings: The party file's [data], or None.
            source: Another source instead of the one in ``settings``.
            query: Another query instead of the one in ``settings``.

        Raises InputError if the run was trained for other labels, or with passive parties and
        without a student.
        """
        try:
            trained = load_trained(run, name)
        except InputError as error:
            raise InputError(error.code, f"predict.alone: {error}") from None
        recipe = trained.recipe
        if recipe.passives and not has_student(trained):
            raise InputError(
                Code.CONFIG_INVALID,
                f"predict.alone: {run}: was trained with {recipe.passives[0].name} and without a "
                f"phase of kind student. Give the run of {name} by itself (vfl simulate "
                f"{name}.toml --baseline alone).",
            )
        own_labels, joint_labels = (
            Labels.from_state(trained_run.state["labels"]) for trained_run in (trained, joint)
        )
        if (own_labels.kind, own_labels.classes) != (joint_labels.kind, joint_labels.classes):
            raise InputError(
                Code.CONFIG_INVALID,
                f"predict.alone: {run}: has other labels than {joint.path}. Train it again.",
            )
        alone = cls.open_for(trained, name, prediction_data(settings, source, trained.state, query))
        return replace(alone, says_parties=joint.says_parties, expects=joint.expects)

    @classmethod
    def open_for(
        cls, trained: TrainedRun, name: str, data: DataSettings, load: Load = load_rows
    ) -> Alone:
        """Reads the rows to predict with a trained run.

        ``name``: The name of the active party. ``data``: The settings that ``prediction_data``
        returns. Raises InputError if the rows cannot be read.
        """
        work = _make_work(trained, data, ())
        return cls(trained, open_party(trained.recipe, name, data, trained.encoder, load, work))

    def meaning(self, settings: DataSettings) -> str:
        """Describes the scores of the result in one line.

        ``settings``: The party file's [data], which names the label's column.
        """
        return meaning(Labels.from_state(self.trained.state["labels"]), label_name(settings))

    def write(self, outputs: Sequence[Output], device: torch.device) -> Predicted:
        """Writes the scores of all rows to ``outputs``, and returns the numbers of predicted rows.

        Raises InputError if a result cannot be written.
        """
        opened, recipe = self.opened, self.trained.recipe
        work = replace(
            _make_work(self.trained, opened.settings, outputs),
            says_parties=self.says_parties,
            expects=self.expects,
        )
        party = assemble(replace(opened, work=work), expect_rows(opened), device=device)
        pipe = MemoryPipe(opened.name, ())
        party.connect(
            _NoConnections(ExchangeHub(pipe, timeout_s=recipe.run.step_timeout_s)), Hooks()
        )
        (phase,) = party.phases
        phase.run_round(0)
        return Predicted.of(opened.table, len(opened.table))


def _make_work(trained: TrainedRun, data: DataSettings, outputs: Sequence[Output]) -> Prediction:
    solo = has_student(trained)
    return Prediction(trained, trained.recipe.active, id_names(data), outputs, ALONE, solo)


def has_student(trained: TrainedRun) -> bool:
    """Returns whether the run trained a student, with which the active party predicts alone."""
    return SOLO in trained.state["models"]


def load_solo(run: Path, name: str) -> TrainedRun:
    """Loads the active party's part of a run with a student.

    Raises InputError if the run has no student, or if ``name`` is a passive party.
    """
    trained = load_trained(run, name)
    if name != trained.recipe.active.name:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--student: {name} is a passive party, and has no labels to learn from. Use "
            f"--student only at {trained.recipe.active.name}.",
        )
    if not has_student(trained):
        raise InputError(
            Code.CONFIG_INVALID,
            f"--student: {trained.path}: the run has trained no student. Add a phase of kind "
            "student to the recipe, and train again.",
        )
    return trained


def is_away(error: VflError) -> bool:
    """Returns whether an error means that the server or a party was unreachable."""
    return isinstance(error, LostError) or error.code is Code.UNREACHABLE


def write_waiting(trained: TrainedRun, table: Table, ids: Sequence[str], output: Output) -> None:
    """Writes a result in which no row has a score. Raises InputError if it cannot be written."""
    labels = Labels.from_state(trained.state["labels"])
    no_outputs = torch.zeros(0, trained.recipe.task.outputs)
    columns: dict[str, Any] = {
        name: pa.nulls(len(table), pa.array(values).type)
        for name, values in result_columns(trained.recipe, labels, no_outputs).items()
    }
    if trained.says_parties:
        participation = {PARTIES: pa.nulls(len(table), pa.string())}
        if trained.expects:
            participation[f"{EXPECTED}{trained.expects}"] = pa.nulls(len(table), pa.float64())
        columns = {**participation, **columns}
    output.write(list_all_rows(ids, table, columns, WAITING), table.own)
