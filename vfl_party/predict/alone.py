"""What the active party writes of a prediction if another party is away: scores of its own model,
or none.
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
from vfl_party.assembly.party import Opened, assemble, expected_rows, open_party
from vfl_party.base.step_timing import Clock
from vfl_party.data import Labels, Table
from vfl_party.phases.context import Hooks
from vfl_party.predict.prediction import Prediction, TrainedRun, load_trained, prediction_data
from vfl_party.predict.results import (
    ALONE,
    PARTIES,
    WAITING,
    Output,
    id_names,
    listed_rows,
    result_columns,
)


@dataclass(frozen=True)
class _Nobody:
    """The connections of a party that is alone; see ``vfl_party.outbound.exchange.Connections``."""

    hub: Hub | None
    link: Link | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Alone:
    """The active party's own model, and its rows as that model needs them."""

    trained: TrainedRun
    opened: Opened
    says_parties: bool = False

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
        """Loads a run of ``--baseline alone``, and reads the rows to predict.

        Args:
            run: its folder.
            joint: the run with the others.
            name: of the active party.
            settings, source, query: as in ``prediction_data``.

        Raises InputError, also if the model was trained with others, or for other labels.
        """
        try:
            trained = load_trained(run, name)
        except InputError as error:
            raise InputError(error.code, f"predict.alone: {error}") from None
        recipe = trained.recipe
        if recipe.passives:
            text = (
                f"predict.alone: {run}: was trained with {recipe.passives[0].name}; give the run "
                f"of {name} by itself (vfl simulate {name}.toml --baseline alone)"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        if trained.state["labels"] != joint.state["labels"]:
            text = f"predict.alone: {run}: has other labels than {joint.path}; train it again"
            raise InputError(Code.CONFIG_INVALID, text)
        data = prediction_data(settings, source, trained.state, query)
        work = Prediction(trained, recipe.active, id_names(data), (), ALONE)
        opened = open_party(recipe, name, data, trained.encoder, work=work)
        return cls(trained, opened, joint.says_parties)

    def write(self, output: Output, device: torch.device) -> None:
        """Writes the scores of all rows, as a prediction with others would. Raises InputError."""
        opened, recipe = self.opened, self.trained.recipe
        data = opened.settings
        ids, says = id_names(data), self.says_parties
        work = Prediction(self.trained, recipe.active, ids, (output,), ALONE, says)
        party = assemble(replace(opened, work=work), expected_rows(opened), device=device)
        pipe = MemoryPipe(opened.name, ())
        party.connect(_Nobody(ExchangeHub(pipe, timeout_s=recipe.run.step_timeout_s)), Hooks())
        (phase,) = party.phases
        phase.run_round(0)


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
        columns = {PARTIES: pa.nulls(len(table), pa.string()), **columns}
    output.write(listed_rows(ids, table, columns, WAITING), table.own)
