"""Predicts rows with a finished run on this machine, with all parties in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import Data
from vfl_common.config.data import FRAME, DataSettings, id_columns, ids_only, resolved, shown
from vfl_common.errors import Code, InputError

if TYPE_CHECKING:
    from vfl.simulation.origin import Origin
    from vfl_common.config.recipe import Recipe
    from vfl_party.predict.results import Output, Predicted


@dataclass(frozen=True)
class Result:
    """A prediction. ``columns``: as ``Run.predict`` returns them; ``rows``: of the active party's
    table.

    ``meaning``: what the numbers are, in one line. ``notes``: sentences about what is odd in rows
    and file.
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
    """Predicts rows with the run in the folder ``run``; ``data`` is that of ``Run.predict``.

    ``output``: where and how the result is written, too; None: nowhere. ``queries``: {party: the
    SELECT that gives its new rows}, of a database in ``data`` or of that of training. ``without``:
    passive parties that take no part. ``solo``: the active party scores its rows by itself, with
    the run's student.

    Raises VflError.
    """
    import pyarrow.parquet

    from vfl.simulation.inprocess import predict_in_process, predict_solo
    from vfl.simulation.origin import Origin
    from vfl_common.run_folder import RunFolder
    from vfl_party.data import loading
    from vfl_party.predict.results import Output

    if output is not None:
        output.check()
    if solo and without:
        text = "solo: the active party scores by itself, so without means nothing; give one of them"
        raise InputError(Code.CONFIG_INVALID, text)
    whole = Origin.of(run)
    origin = Origin(
        whole.base, {name: each for name, each in whole.data.items() if name not in without}
    )
    for name in origin.data:
        if not (run / name / "run.json").exists():
            text = f"{run}: the folder of {name} is not in it; all parties predict together"
            raise InputError(Code.FILE_INVALID, text)
    recipe = RunFolder(run / next(iter(origin.data)), run.name).recipe()
    if queries:
        data = _asked(data or {}, queries, origin)
    if solo:
        origin = _of_one(origin, recipe.active.name)
    settings, frames = _own_rows(run, origin) if data is None else new_rows(recipe, data, origin)
    with tempfile.TemporaryDirectory(prefix="vfl-") as place:
        result = Output(Path(place) / "predictions.parquet")
        outputs = [result] if output is None else [result, output]
        with_others = (run, settings, outputs, Path(place) / "prediction")
        rows, meaning, notes = (
            predict_solo(run, settings, outputs, loading(frames), origin.base)
            if solo
            else predict_in_process(
                *with_others, load=loading(frames), modules=origin.base, without=without
            )
        )
        table = pyarrow.parquet.read_table(result.path)
    notes += [text for text in [output.advice(table) if output is not None else ""] if text]
    return Result(table.to_pydict(), rows, meaning, notes)


def _of_one(origin: Origin, party: str) -> Origin:
    """Returns where the data of ``party`` alone came from."""
    return type(origin)(origin.base, {party: origin.data[party]})


def _own_rows(run: Path, origin: Origin) -> tuple[dict[str, DataSettings], dict[str, Any]]:
    """Returns each party's data of training, and no frames. Raises InputError if the rows were in
    memory.
    """
    sources = {name: known.source for name, known in origin.parts().items()}
    gone = [name for name, source in sources.items() if source.startswith(FRAME)]
    if gone:
        text = (
            f"{run}: the rows of {', '.join(gone)} were in memory in training; say which to predict"
        )
        raise InputError(Code.DATA_INVALID, text)
    return dict(origin.data), {}


def _asked(data: Mapping[str, Any], queries: Mapping[str, str], origin: Origin) -> dict[str, Any]:
    """Returns ``data`` with the queries of their databases. Raises InputError for a query of
    something else.
    """
    found, trained = dict(data), origin.parts()
    for name, query in queries.items():
        if name not in trained:
            text = f"--query: {name!r} is no party of the run (parties: {', '.join(trained)})"
            raise InputError(Code.DATA_INVALID, text)
        source = str(found.get(name, trained[name].source))
        if "://" not in source:
            text = (
                f"--query {name}=…: is for a database, and its source is {shown(source)}; give "
                f"--data {name}=URL"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        found[name] = Data(source, settings={"query": query})
    return found


def new_rows(
    recipe: Recipe, data: Mapping[str, Any], origin: Origin
) -> tuple[dict[str, DataSettings], dict[str, Any]]:
    """Returns each party's data settings of training with the new rows as source, and {party: its
    frame}.
    """
    whole, trained = origin.data, origin.parts()
    settings, frames = {}, {}
    if not isinstance(data, Mapping) or not data:
        raise InputError(Code.DATA_INVALID, "predict: give {party: its rows}")
    unknown = [name for name in data if name not in trained]
    if unknown:
        text = f"predict: {unknown[0]!r} is no party of the run (parties: {', '.join(trained)})"
        raise InputError(Code.DATA_INVALID, text)
    without = {
        name
        for name, known in trained.items()
        if (not _has_features(recipe, name) if name in whole else known.columns == ())
    }
    for name, known in trained.items():
        of = name if name in data else next(iter(data)) if name in without else ""
        if not of:
            raise InputError(
                Code.DATA_INVALID,
                f"predict: rows of {name} are missing; give a source for it, too",
            )
        given = data[of]
        found = given if isinstance(given, Data) else Data(given)
        # A party with labels only takes another's ids.
        if of != name:
            found = Data(found.frame, id=found.id or trained[of].id)
        is_source = isinstance(found.frame, str | Path)
        source = resolved(str(found.frame), Path()) if is_source else f"{FRAME}{name}"
        changes: dict[str, Any] = {"source": source, "limit": None, "unaligned": None}
        changes |= {key: getattr(trained[of], key) for key in ("id_rules", "duplicates")}
        changes |= {"id": tuple(id_columns(found.id))} if found.id else {}
        changes |= {key: found.settings[key] for key in ("query",) if key in found.settings}
        settings[name] = known.model_copy(update=changes)
        if name in without:
            settings[name] = ids_only(settings[name])
        if not is_source:
            frames[name] = found.frame
    joined = {
        name: known.model_copy(update={"parts": {part: settings[part] for part in known.parts}})
        for name, known in whole.items()
        if known.parts
    }
    return joined or settings, frames


def _has_features(recipe: Recipe, name: str) -> bool:
    """Whether a party has columns of its own, and not labels only."""
    place = recipe.party(name)
    return place is None or place.features
