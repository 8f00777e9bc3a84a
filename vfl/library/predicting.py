"""Predicts rows with a finished run on this machine, with all parties in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import Data
from vfl_common.config.data import DataSettings, parse_id_columns, without_features
from vfl_common.config.sources import FRAME, resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords

if TYPE_CHECKING:
    from vfl.simulation.origin import Origin
    from vfl_common.config.recipe import Recipe
    from vfl_party.predict.results import Output, Predicted


@dataclass(frozen=True)
class Result:
    """The result of a prediction.

    ``columns``: as ``Run.predict`` returns them. ``rows``: the numbers of rows and of scored rows
    of the active party. ``meaning``: a line that explains the scores. ``notes``: warnings about the
    rows and the output file.
    """

    columns: dict[str, list[Any]]
    rows: Predicted
    meaning: str
    notes: list[str]


def predict_rows(
    run: Path,
    data: Mapping[str, Any] | None = None,
    output: Output | None = None,
    queries: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    *,
    solo: bool = False,
) -> Result:
    """Predicts rows with the models of the run in the folder ``run``.

    ``data``: see ``Run.predict``. ``output``: the file to which the result is also written; None:
    no file. ``queries``: {party: the SELECT for its new rows}, for a database in ``data`` or of the
    training. ``without``: the passive parties that do not take part. ``solo``: whether the active
    party scores its rows by itself, with the run's student. Raises VflError.
    """
    import pyarrow.parquet

    from vfl.simulation.inprocess import predict_in_process, predict_solo
    from vfl.simulation.origin import Origin
    from vfl_common.run_folder import RunFolder
    from vfl_party.data import make_loader
    from vfl_party.predict.results import Output

    if output is not None:
        output.check()
    if solo and without:
        raise InputError(
            Code.CONFIG_INVALID,
            "solo: cannot be combined with without, as the active party scores by itself. Give "
            "one of them.",
        )
    full_origin = Origin.of(run)
    origin = Origin(
        full_origin.base,
        {name: part for name, part in full_origin.data.items() if name not in without},
    )
    for name in origin.data:
        if not (run / name / "run.json").exists():
            raise InputError(
                Code.FILE_INVALID,
                f"{run}: the folder of {name} is missing. Copy it there: all parties predict "
                "together.",
            )
    recipe = RunFolder(run / next(iter(origin.data)), run.name).recipe()
    if queries:
        data = _add_queries(data or {}, queries, origin)
    if solo:
        origin = _select_party(origin, recipe.active.name)
    settings, frames = (
        _get_training_rows(run, origin)
        if data is None
        else make_settings_of_new_rows(recipe, data, origin)
    )
    with tempfile.TemporaryDirectory(prefix="vfl-") as folder:
        result = Output(Path(folder) / "predictions.parquet")
        outputs = [result] if output is None else [result, output]
        rows, meaning, notes = (
            predict_solo(run, settings, outputs, make_loader(frames), origin.base)
            if solo
            else predict_in_process(
                run,
                settings,
                outputs,
                Path(folder) / "prediction",
                load=make_loader(frames),
                modules=origin.base,
                without=without,
            )
        )
        table = pyarrow.parquet.read_table(result.path)
    notes += [text for text in [output.advice(table) if output is not None else ""] if text]
    return Result(table.to_pydict(), rows, meaning, notes)


def _select_party(origin: Origin, party: str) -> Origin:
    """Returns the origin with the data of only one party."""
    return type(origin)(origin.base, {party: origin.data[party]})


def _get_training_rows(run: Path, origin: Origin) -> tuple[dict[str, DataSettings], dict[str, Any]]:
    """Returns each party's data settings of training, and no frames. Raises InputError if the
    training rows were in memory.
    """
    sources = {name: part.source for name, part in origin.parts().items()}
    in_memory = [name for name, source in sources.items() if source.startswith(FRAME)]
    if in_memory:
        raise InputError(
            Code.DATA_INVALID,
            f"{run}: the rows of {', '.join(in_memory)} were in memory in training. Give the rows "
            "to predict as data.",
        )
    return dict(origin.data), {}


def _add_queries(
    data: Mapping[str, Any], queries: Mapping[str, str], origin: Origin
) -> dict[str, Any]:
    """Adds the queries to the parties' sources in ``data``. Raises InputError for a source that is
    not a database.
    """
    result, trained = dict(data), origin.parts()
    for name, query in queries.items():
        if name not in trained:
            raise InputError(
                Code.DATA_INVALID,
                f"--query: {name!r} is not a party of the run. Choose one of {', '.join(trained)}.",
            )
        source = str(result.get(name, trained[name].source))
        if "://" not in source:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--query {name}=…: needs a database (got {hide_passwords(source)}). Give --data "
                f"{name}=URL.",
            )
        result[name] = Data(source, settings={"query": query})
    return result


def make_settings_of_new_rows(
    recipe: Recipe, data: Mapping[str, Any], origin: Origin
) -> tuple[dict[str, DataSettings], dict[str, Any]]:
    """Returns each party's data settings of training with the new rows as source, and {party: its
    frame}.
    """
    recorded, trained = origin.data, origin.parts()
    settings, frames = {}, {}
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            Code.DATA_INVALID, "predict: data must be a dict with rows. Give {party: its rows}."
        )
    unknown = [name for name in data if name not in trained]
    if unknown:
        raise InputError(
            Code.DATA_INVALID,
            f"predict: {unknown[0]!r} is not a party of the run. Choose one of "
            f"{', '.join(trained)}.",
        )
    without = {
        name
        for name, part in trained.items()
        if (not _has_features(recipe, name) if name in recorded else part.columns == ())
    }
    for name, trained_part in trained.items():
        rows_of = name if name in data else next(iter(data)) if name in without else ""
        if not rows_of:
            raise InputError(
                Code.DATA_INVALID,
                f"predict: the rows of {name} are missing. Give a source for it, too.",
            )
        rows = data[rows_of]
        part = rows if isinstance(rows, Data) else Data(rows)
        # A party that has only labels uses the ids of another party.
        if rows_of != name:
            part = Data(part.frame, id=part.id or trained[rows_of].id)
        is_source = isinstance(part.frame, str | Path)
        source = resolve_source(str(part.frame), Path()) if is_source else f"{FRAME}{name}"
        changes: dict[str, Any] = {"source": source, "limit": None, "unaligned": None}
        changes |= {key: getattr(trained[rows_of], key) for key in ("id_rules", "duplicates")}
        changes |= {"id": tuple(parse_id_columns(part.id))} if part.id else {}
        changes |= {key: part.settings[key] for key in ("query",) if key in part.settings}
        settings[name] = trained_part.model_copy(update=changes)
        if name in without:
            settings[name] = without_features(settings[name])
        if not is_source:
            frames[name] = part.frame
    joined = {
        name: joint.model_copy(update={"parts": {part: settings[part] for part in joint.parts}})
        for name, joint in recorded.items()
        if joint.parts
    }
    return joined or settings, frames


def _has_features(recipe: Recipe, name: str) -> bool:
    """Whether a party has features, and not only labels."""
    place = recipe.party(name)
    return place is None or place.features
