"""Runs the further processes of a party that torchrun has started. They compute on their GPUs for
the first process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from vfl_common.process.logs import version
from vfl_party.assembly.files import OwnFiles, read_own
from vfl_party.assembly.party import OpenedParty, PutOnRanks, open_party
from vfl_party.base.devices import keep_freed_memory, plain_arithmetic, set_threads
from vfl_party.data import Table
from vfl_party.data.inputs.made import BatchLog
from vfl_party.data.rows import Prepared
from vfl_party.models import InputSpec
from vfl_party.phases.context import MakeEncoder
from vfl_party.predict.prediction import Prediction
from vfl_party.predict.results import id_names
from vfl_party.predict.run import load_joint, prediction_data
from vfl_party.ranks import (
    RankRows,
    Ranks,
    SpreadEncoder,
    TablePart,
    begin_ranks,
    follow,
    join_ranks,
)


def list_shared_settings(files: OwnFiles) -> dict[str, str]:
    """Returns {name: value} of the settings, besides the table, that must be the same in all
    processes of a party.
    """
    return {
        "the release of this system": version(),
        "the release of torch": torch.__version__,
        "the recipe": files.recipe.digest(),
        "the encoder": files.encoder.model_dump_json(),
    }


def make_spread(ranks: Ranks, files: OwnFiles) -> PutOnRanks:
    """Returns a function with which the first process puts the encoder of a generation on all
    processes.
    """
    precision = files.recipe.model.precision

    def spread(
        encoder: nn.Module, prepared: Prepared, parts: Sequence[TablePart], noted: BatchLog
    ) -> SpreadEncoder:
        begin_ranks(ranks, list_shared_settings(files), parts, prepared)
        assert prepared.features is not None  # noqa: S101 - it has an encoder
        return SpreadEncoder(ranks, encoder, prepared.features.spec, precision, noted)

    return spread


def lend_to_train(path: Path, device: str | None) -> None:
    """Computes for the first process, which trains, until the first process ends. Raises
    InputError.
    """
    files = read_own(path, device=device)
    _lend(files, files.open)


def lend_to_predict(
    path: Path,
    device: str | None,
    name: str,
    run: Path,
    without: Collection[str],
    data: str | None,
    query: str | None,
) -> None:
    """Computes for the first process, which predicts with the same arguments, until the first
    process ends. Raises InputError.
    """
    trained = load_joint(run, name, without)
    files = read_own(path, device=device, recipe=trained.recipe)
    rows = prediction_data(files.file.data, data, trained.state, query)
    work = Prediction(trained, files.settings, id_names(rows), ())

    def open_rows() -> OpenedParty:
        return open_party(files.recipe, files.name, rows, files.encoder, work=work)

    _lend(files, open_rows)


def _lend(files: OwnFiles, open_data: Callable[[], OpenedParty]) -> None:
    """Computes for the first process until it ends. ``open_data``: Reads the party's data, as the
    first process does.
    """
    set_threads(files.file.threads)
    plain_arithmetic()
    keep_freed_memory()

    def read_tables() -> list[Table]:
        party = open_data()
        return [party.table, *([] if party.unaligned is None else [party.unaligned])]

    def make_encoder(spec: InputSpec, is_shared: bool) -> nn.Module:
        make = MakeEncoder(files.recipe, files.name, files.encoder, spec)
        return files.course.encoder(make) if is_shared else make("encoder")

    with join_ranks(files.device, files.recipe.run.step_timeout_s) as ranks:
        assert ranks is not None  # noqa: S101 - it is not the first
        rows = RankRows(ranks, list_shared_settings(files), read_tables)
        follow(ranks, rows, make_encoder, files.recipe.model.precision)
