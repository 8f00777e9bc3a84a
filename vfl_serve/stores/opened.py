"""Opens the feature store of a party file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import DatabaseStore, ServiceStore, is_database
from vfl_common.errors import Code, InputError
from vfl_party.assembly.files import PartyFiles
from vfl_party.base.phase import Tree
from vfl_party.data import Preprocessor, Table
from vfl_party.data.table import Categories
from vfl_party.phases.course import Course
from vfl_party.predict.run import TrainedRun, prediction_data
from vfl_serve.stores.alchemy import AlchemyRows
from vfl_serve.stores.by_ids import ByIds
from vfl_serve.stores.postgres import PostgresRows
from vfl_serve.stores.seam import Source
from vfl_serve.stores.service import ServiceRows

_POSTGRES = ("postgresql://", "postgres://")
# Settings that apply to training or to files only.
_NOT_HERE: dict[str, Any] = dict.fromkeys(
    ("label", "event", "group", "weight", "split", "limit", "sheet", "names", "format", "unaligned")
)


def open_store(
    files: PartyFiles,
    trained: TrainedRun,
    store: DatabaseStore | ServiceStore,
    advise: Callable[[str], None],
) -> ByIds:
    """Opens a database or a service and tests it with a query without ids.

    ``advise``: shows a sentence to this party's operator. Raises InputError if the columns of
    training are not available.
    """
    settings, preprocessor = (
        make_store_settings(files, trained.state, store),
        _load_preprocessor(trained.state),
    )
    source: Source
    if isinstance(store, ServiceStore):
        service_id = store.service_id if store.service_id is not None else trained.recipe.name
        source = ServiceRows(settings, store, preprocessor, service_id=service_id, party=files.name)
    elif settings.source.startswith(_POSTGRES):
        source = PostgresRows(settings, store.connections)
    else:
        source = AlchemyRows(settings, store.connections)
    try:
        source.check()
    except BaseException:
        source.close()
        raise
    rules = settings.with_id_rules(tuple(trained.recipe.rows.id_rules)).id_rules or ()
    as_cells = Course(trained.recipe).lone_phase is not None
    device = torch.device("cpu") if as_cells else files.device
    return ByIds(source, preprocessor, rules, device, advise, as_cells=as_cells)


def make_store_settings(
    files: PartyFiles, state: Tree, store: DatabaseStore | ServiceStore
) -> DataSettings:
    """Returns the settings for reading rows of the store. Raises InputError."""
    data = files.file.data
    if data is None or not data.id:
        raise InputError(
            Code.CONFIG_INVALID,
            f"party {files.name}: serve.store needs the id column. Add data.id.",
        )
    preprocessor = _load_preprocessor(state)
    if preprocessor.image_shape is not None or data.view is not None or data.parts:
        raise InputError(
            Code.CONFIG_INVALID,
            f"party {files.name}: serve.store needs a model that was trained on the columns of one "
            "table. Remove serve.store.",
        )
    if isinstance(store, ServiceStore):
        if len(data.id) > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {files.name}: a feature service needs an id of one column "
                f"(got {', '.join(data.id)}). Correct data.id.",
            )
        place: dict[str, Any] = {"source": store.url, "query": None}
    else:
        place = {"source": store.source or data.source, "query": store.query}
        if not is_database(place["source"]):
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {files.name}: data.source is not a database. Set serve.store.source.",
            )
    # Numbers are read in the format of the training table, whatever the other rows contain.
    style = preprocessor.style or (data.decimal or ".", data.thousands or "")
    written = {"decimal": style[0], "thousands": style[1], "limit_by": "first", "labels": ()}
    settings = data.model_copy(update={**_NOT_HERE, **written, **place})
    return prediction_data(settings, None, state)


def make_empty_table(preprocessor: Preprocessor, source: str) -> Table:
    """Returns a table without rows, with the columns of training."""
    numbers, words = preprocessor.numeric_names, preprocessor.categorical_names
    cells = Categories(np.empty((0, len(words)), np.int32), ((),) * len(words))
    return Table(
        source,
        (),
        numeric_NF=np.empty((0, len(numbers)), np.float32) if numbers else None,
        numeric_names=numbers,
        categorical=cells if words else None,
        categorical_names=words,
        kinds=preprocessor.kinds or {},
    )


def _load_preprocessor(state: Tree) -> Preprocessor:
    if state["preprocessor"] is None:
        raise InputError(
            Code.CONFIG_INVALID, "serve.store: this party has no features. Remove the table."
        )
    return Preprocessor.from_state(state["preprocessor"])
