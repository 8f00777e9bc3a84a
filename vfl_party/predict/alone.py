"""A prediction of the active party without the others, because one is away or because it does not
ask them: scores of its own model, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError, LostError, VflError
from vfl_common.link import PROTOCOL, Hub, Link
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
    """The connections of a party that is alone; see ``vfl_party.outbound.exchange.Connections``."""

    hub: Hub | None
    link: Link | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    record: None = None


@dataclass(frozen=True)
class Alone:
    """The active party's own model, and its rows as that model needs them."""

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
        """Loads a run of ``--baseline alone``, or one that has trained a student, and reads the
        rows to predict.

        Args:
            run: its folder.
            joint: the run with the others.
            name: of the active party.
            settings, source, query: as in ``prediction_data``.

        Raises InputError, also if the model was trained for other labels, or with others and
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
        own, whole = (Labels.from_state(run_.state["labels"]) for run_ in (trained, joint))
        if (own.kind, own.classes) != (whole.kind, whole.classes):
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
        """Reads the rows ``data``, as ``prediction_data`` gives them, for a trained run. ``name``:
        of the active party. Raises InputError.
        """
        work = _make_work(trained, data, ())
        return cls(trained, open_party(trained.recipe, name, data, trained.encoder, load, work))

    def meaning(self, settings: DataSettings) -> str:
        """Returns in one line what the numbers of the result are. ``settings``: the party's own,
        which name the label.
        """
        return meaning(Labels.from_state(self.trained.state["labels"]), label_name(settings))

    def write(self, outputs: Sequence[Output], device: torch.device) -> Predicted:
        """Writes the scores of all rows, as a prediction with others would, and counts them. Raises
        InputError.
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
    """Whether the run has trained a model with which the active party scores by itself."""
    return SOLO in trained.state["models"]


def load_solo(run: Path, name: str) -> TrainedRun:
    """Loads the active party's part of a run with a student. Raises InputError if it has none, or
    if ``name`` is a passive party.
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
    """Whether a prediction has ended because the server or a party was not there."""
    return isinstance(error, LostError) or error.code is Code.UNREACHABLE


def write_waiting(trained: TrainedRun, table: Table, ids: Sequence[str], output: Output) -> None:
    """Writes all rows without a score, with the columns that a prediction has. Raises
    InputError.
    """
    labels = Labels.from_state(trained.state["labels"])
    none = torch.zeros(0, trained.recipe.task.outputs)
    columns: dict[str, Any] = {
        name: pa.nulls(len(table), pa.array(values).type)
        for name, values in result_columns(trained.recipe, labels, none).items()
    }
    if trained.says_parties:
        more = {PARTIES: pa.nulls(len(table), pa.string())}
        if trained.expects:
            more[f"{EXPECTED}{trained.expects}"] = pa.nulls(len(table), pa.float64())
        columns = {**more, **columns}
    output.write(list_all_rows(ids, table, columns, WAITING), table.own)
