"""The class ``Run``: the metrics, curves, bytes, plots and predictions of a finished run. New rows
are predicted with all parties in this process.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import Data
from vfl.library.plugins import with_plugins
from vfl_common.config.data import DataSettings, parse_id_columns, without_features
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import read_recorded_recipe
from vfl_common.config.sources import FRAME, resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.summary import Bytes, Summary
from vfl_common.text import hide_passwords
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl.library.model import Model
    from vfl.simulation.federation import Origin
    from vfl.summary.reading import RunRecord
    from vfl.summary.rounds import RoundLine
    from vfl_common.config.recipe import Recipe
    from vfl_party.predict.results import Output, Predicted


class _Metrics(dict[str, dict[str, float]]):
    """A dict of metrics whose KeyError explains why a split has no metrics."""

    def __missing__(self, split: str) -> dict[str, float]:
        splits = ", ".join(self) or "none"
        raise KeyError(
            f"no metrics of {split!r} rows (got {splits}). Add a phase of kind 'evaluate'."
        )


class Run:
    """A finished run in its folder.

    ``folder``: the folder of the run. It has the same files as a run of ``vfl simulate``, so that
    ``vfl report`` and ``vfl export`` also accept it.
    """

    def __init__(self, folder: Path, plugins: RunPlugins | None = None) -> None:
        """Use ``simulate`` or ``Run.load`` instead of this constructor."""
        from vfl.summary.reading import find

        self._found = find(folder)
        self.folder = self._found.folder
        self._plugins = plugins

    @classmethod
    def load(cls, folder: str | Path, *, plugins: RunPlugins | None = None) -> Run:
        """Opens the folder of a finished run.

        ``plugins``: the plug-ins of the run, as in ``simulate``, for its models and predictions.
        Raises VflError if the folder contains no finished run.
        """
        return cls(Path(folder), plugins)

    @property
    def summary(self) -> Summary:
        """The contents of ``summary.json``."""
        return self._found.summary

    @property
    def settings(self) -> Settings:
        """The parsed recipe of the run. A baseline has its own recipe. Raises VflError if the
        active party's folder is missing in the run's folder.
        """
        path = self.folder / self._active / "recipe.json"
        try:
            return read_recorded_recipe(json.loads(path.read_bytes()), str(path))
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read ({error.strerror}). Check that the run's folder is "
                "complete.",
            ) from None
        except (ValueError, RecursionError):
            raise InputError(
                Code.FILE_INVALID, f"{path}: is damaged. Restore the file from a copy."
            ) from None

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of the whole model: {split: {name: value}}."""
        return _Metrics((str(split), dict(named)) for split, named in self.summary.metrics.items())

    @property
    def bytes(self) -> Bytes:
        """The traffic between the parties. ``bytes.total.payload_bytes`` is the size of all
        tensors.
        """
        return self.summary.bytes

    def curves(self, party: str | None = None) -> dict[str, list[Any]]:
        """Returns the metrics of each round, as columns: ``phase``, ``round``, ``train loss``,
        ``validation auc``, ….

        ``pandas.DataFrame(run.curves())`` accepts these columns. A metric that a round does not
        have is None. ``party``: the party that reported the metrics; by default the active party.
        Raises VflError if the party's folder is missing in the run's folder.
        """
        from vfl.summary.reading import read_history

        name = party or self._active
        if not (self.folder / name / "run.json").exists():
            raise InputError(
                Code.FILE_INVALID,
                f"{self.folder}: the folder of {name} is missing. Copy it there, or name "
                "another party.",
            )
        rounds = read_history(self.folder / name)
        names = dict.fromkeys(
            f"{s} {n}" for row in rounds for s, metrics in row.metrics.items() for n in metrics
        )
        columns: dict[str, list[Any]] = {
            "phase": [row.phase for row in rounds],
            "round": [row.round for row in rounds],
        }
        for column in names:
            split, _, name = column.partition(" ")
            columns[column] = [row.metrics.get(split, {}).get(name) for row in rounds]
        return columns

    def bytes_to(self, metric: str, value: float, *, split: str = "validation") -> int | None:
        """Returns the message bytes of all parties until ``metric`` of the ``split`` rows first
        reached ``value`` or better; None if it never did (SS-VFL, Table 1).

        All bytes of a round count, including its validation. The bytes of phases of kind
        ``evaluate`` do not count, nor the bytes of an earlier run that this run continues. Raises
        VflError if no round has the metric, or a party's folder is missing in the run's folder.
        """
        return _count_bytes_to(self._found, self.settings, metric, value, split)

    @property
    def predictions(self) -> dict[str, list[Any]]:
        """The predictions from which the final metrics were computed, as columns: ``phase``,
        ``split``, the ids, ``truth``, and the scores.

        ``truth`` has the values of the label's column. Ids and scores have the same names as in
        ``predict``. Raises VflError if the active party's folder has no predictions.
        """
        import pyarrow
        import pyarrow.parquet

        from vfl_party.predict.results import KEPT

        path = self.folder / self._active / KEPT
        try:
            columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
        except FileNotFoundError:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: no such file. Run a phase of kind evaluate or gbdt: the active party "
                "then writes it.",
            ) from None
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read ({error}). Restore the file from a copy.",
            ) from None
        return columns

    def predict(
        self,
        data: Mapping[str, Any] | None = None,
        *,
        output: str | Path | None = None,
        without: Collection[str] = (),
        solo: bool = False,
    ) -> dict[str, Any]:
        """Predicts new rows, with all parties in this process.

        Args:
            data: {party: its part of the rows}, a frame, ``vfl.Data`` or a path for each party
                with features, also for a baseline on their joined columns. It needs the columns of
                training, but no label. By default, the run's own rows are predicted again. With
                ``rows.align = "psi"``, the rows that all parties hold get a score. With
                ``rows.partial``, all rows of the active party get a score. With ``rows.align =
                "none"``, the rows that the active party and another party hold get a score, with
                the first such party.
            output: a new file for the result, CSV or Parquet by its suffix. Only you may read it.
            without: the passive parties that do not take part. The model must have been trained for
                missing parties (``subsets`` or ``party_dropout``), or the parties must hold
                different rows. The column ``parties`` names the parties that took part.
            solo: whether the student of the run scores the rows. ``data`` then has only the active
                party's rows.

        Returns columns with all rows of the active party, in the same order: its own ids, named as
        in its table (with the prefix ``id_`` if the result has a column of the same name), the ids
        after normalisation for alignment (``matched_<name>``), and ``state``: ``scored``, or the
        reason why a row has no score. A regression adds ``value``. A classification adds ``class``
        and ``score_<class>`` for each class, or only for the positive class of two. Raises
        VflError.

        Warns (``UserWarning``) of categories that training did not have, and of numbers far outside
        the range of training.
        """

        from vfl_party.predict.results import Output

        file = Output(Path(output)) if output is not None else None
        with with_plugins(self._plugins):
            result = predict_rows(self.folder, data, file, without=without, solo=solo)
        for note in result.notes:
            warnings.warn(note, stacklevel=2)
        return result.columns

    def model(self, party: str | None = None) -> Model:
        """Returns a party's trained models, which can also prepare new rows.

        ``party``: the party's name; by default the active party. Raises VflError.
        """
        from vfl.library.model import Model

        return Model.load(self.folder, party, plugins=self._plugins)

    def plot(self) -> Figure:
        """Draws loss and metrics by round. A notebook shows the returned figure, and
        ``.savefig(path)`` saves it.
        """
        from vfl.summary.picture import draw_run_curves

        return draw_run_curves(self._found)

    @property
    def _active(self) -> str:
        return next(party.name for party in self.summary.parties if party.role == "active")

    def _repr_html_(self) -> str:
        """Shows the tables of ``vfl report`` in a notebook."""
        from vfl.summary.table import render, render_html

        return render_html(render(self.summary, self._found.phases))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.metrics.get('test') or self.metrics})"


def _count_bytes_to(
    run: RunRecord, recipe: Settings, metric: str, value: float, split: str = "validation"
) -> int | None:
    """Returns the message bytes of the run until ``metric`` first reached ``value`` or better; None
    if it never did (SS-VFL, Table 1).

    They are the bytes that the parties had sent at the end of that round, and the averages that the
    server sent in the phases up to that round. The bytes of a phase of kind ``evaluate`` do not
    count. Raises InputError if no round has the metric, or if a party's folder is missing.
    """
    from vfl_party.models.metrics import lower_is_better

    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    rounds = {name: _read_rounds(run, name) for name in roles}
    active = rounds[next(name for name, role in roles.items() if role == "active")]
    if not any(metric in line.metrics.get(split, {}) for line in active):
        names = sorted(
            {f"{s} {n}" for line in active for s, ns in line.metrics.items() for n in ns}
        )
        raise InputError(
            Code.CONFIG_INVALID,
            f"{run.folder}: no round has {metric} of {split} rows. Choose one of "
            f"{', '.join(names)}."
            if names
            else f"{run.folder}: no round has metrics. Use a run with a phase that measures them.",
        )
    sign = -1 if lower_is_better(recipe.task, metric) else 1
    evaluate_phases = {phase.name for phase in recipe.phases if phase.kind == "evaluate"}
    # The last training round before the current line.
    last_training: RoundLine | None = None
    for line in active:
        last_training = last_training if line.phase in evaluate_phases else line
        reached = line.metrics.get(split, {}).get(metric)
        if reached is not None and sign * reached >= sign * value:
            return 0 if last_training is None else _count_until(run, recipe, rounds, last_training)
    return None


def _read_rounds(run: RunRecord, name: str) -> list[RoundLine]:
    from vfl.summary.reading import read_history

    rounds = read_history(run.folder / name)
    if not rounds:
        raise InputError(
            Code.FILE_INVALID,
            f"{run.folder}: does not contain the rounds of {name}, which are needed to count "
            "bytes. Copy the folder of each party into it.",
        )
    return rounds


def _count_until(
    run: RunRecord, recipe: Settings, rounds: dict[str, list[RoundLine]], last: RoundLine
) -> int:
    """Returns the bytes that were sent until the end of the round ``last``."""
    order = [phase.name for phase in recipe.phases]
    phases = order[: order.index(last.phase) + 1]
    end = len(phases) - 1, last.round
    sent = 0.0
    for lines in rounds.values():
        finished = [line for line in lines if (order.index(line.phase), line.round) <= end]
        sent += finished[-1].values["bytes/sent"] if finished else 0.0
    roles = {party.name: party.role for party in run.summary.parties}
    averages = sum(
        link.message_bytes
        for link in run.summary.bytes.by_link
        if roles.get(link.sender) == "server" and link.phase in phases
    )
    return int(sent) + averages


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

    from vfl.simulation.federation import Origin
    from vfl.simulation.inprocess import predict_in_process, predict_solo
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
