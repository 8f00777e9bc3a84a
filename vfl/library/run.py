"""A finished run: its numbers, curves, bytes, pictures and predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import Data
from vfl_common.config.data import FRAME, DataSettings, id_columns, ids_only, resolved
from vfl_common.errors import Code, InputError
from vfl_common.summary import Bytes, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl.library.model import Model
    from vfl.simulation.origin import Origin
    from vfl_common.config.recipe import Recipe


class Run:
    """A finished run in its folder.

    ``folder``: as ``vfl simulate`` leaves it, so that ``vfl report`` and ``vfl export`` take it, too.
    """

    def __init__(self, folder: Path) -> None:
        """Use ``simulate`` or ``Run.load``."""
        from vfl.report.reading import find

        self._found = find(folder)
        self.folder = self._found.folder

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Opens the folder of a finished run. Raises VflError if it holds none."""
        return cls(Path(folder))

    @property
    def summary(self) -> Summary:
        """All that ``summary.json`` says."""
        return self._found.summary

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of the whole model: {split: {name: value}}."""
        return {str(split): dict(named) for split, named in self.summary.metrics.items()}

    @property
    def bytes(self) -> Bytes:
        """What crossed between the parties; ``bytes.total.payload_bytes`` is all tensors."""
        return self.summary.bytes

    def curves(self, party: str | None = None) -> dict[str, list[Any]]:
        """Returns the metrics round by round, as columns: ``phase``, ``round``, ``train loss``, ``validation auc``, ….

        ``pandas.DataFrame(run.curves())`` takes them as they are; a metric that a round lacks is None. ``party``: whose
        notes; the active party's if not given. Raises VflError if that party's folder is not in the run's.
        """
        from vfl.report.reading import history

        name = party or self._active
        if not (self.folder / name / "run.json").exists():
            raise InputError(Code.FILE_INVALID, f"{self.folder}: the folder of {name} is not in it")
        rounds = history(self.folder / name)
        names = dict.fromkeys(f"{s} {n}" for each in rounds for s, named in each.metrics.items() for n in named)
        columns: dict[str, list[Any]] = {
            "phase": [each.phase for each in rounds],
            "round": [each.round for each in rounds],
        }
        for whole in names:
            split, _, of = whole.partition(" ")
            columns[whole] = [each.metrics.get(split, {}).get(of) for each in rounds]
        return columns

    @property
    def predictions(self) -> dict[str, list[Any]]:
        """The predictions behind the final metrics, as columns: ``phase``, ``split``, ``id``, ``truth``, then scores.

        ``truth`` is as in the label's column; the scores are named as in ``predict``. Raises VflError if the active
        party's folder has none.
        """
        import pyarrow
        import pyarrow.parquet

        from vfl_party.results import KEPT

        path = self.folder / self._active / KEPT
        try:
            found: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
        except FileNotFoundError:
            text = f"{path}: no such file; a phase of kind evaluate or gbdt writes it, at the active party"
            raise InputError(Code.FILE_INVALID, text) from None
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(Code.FILE_INVALID, f"{path}: cannot be read ({error})") from None
        return found

    def predict(self, data: Mapping[str, Any] | None = None, *, output: str | Path | None = None) -> dict[str, Any]:
        """Predicts new rows, with all parties in this process.

        Args:
            data: {party: its part of the rows}: a frame, ``vfl.Data``, or a path; one for each party that has features,
                also for a baseline of their joined columns. The columns are those of training; no label is needed.
                Without it, the run's own rows are predicted.
            output: a new file for the result, sorted by id: CSV or Parquet, by its ending. Only you may read it.

        Returns columns, in the order of the active party's rows if they are in memory, else sorted by id: the ids,
        under their column's name; ``value`` (regression), ``score`` and ``class`` (binary), or a ``score_…`` for each
        class and ``class``. Raises VflError.
        """
        import pyarrow.parquet

        from vfl.simulation.inprocess import predict_in_process
        from vfl.simulation.origin import Origin
        from vfl_party.data import loading
        from vfl_party.results import check_output, write_table

        if output is not None:
            check_output(Path(output))
        origin = Origin.of(self.folder)
        for name in origin.data:
            if not (self.folder / name / "run.json").exists():
                text = f"{self.folder}: the folder of {name} is not in it; all parties predict together"
                raise InputError(Code.FILE_INVALID, text)
        settings, frames = self._own_rows(origin) if data is None else self._new_rows(data, origin)
        with tempfile.TemporaryDirectory(prefix="vfl-") as place:
            result = Path(place) / "predictions.parquet"
            predict_in_process(
                self.folder, settings, result, Path(place) / "prediction", load=loading(frames), modules=origin.base
            )
            table = pyarrow.parquet.read_table(result)
        if output is not None:
            write_table(Path(output), table)
        active = settings[self._active].ruled(self._recipe(self._active).rows.id_rules)
        first = next(iter(active.parts), self._active)  # whose ids joined tables have
        return _in_order(table.to_pydict(), active.parts.get(first, active), frames.get(first))

    def model(self, party: str | None = None) -> Model:
        """Returns a party's trained models, with the way to prepare rows for them; the active party's if not given.

        Raises VflError.
        """
        from vfl.library.model import Model

        return Model.load(self.folder, party)

    def _own_rows(self, origin: Origin) -> tuple[dict[str, DataSettings], dict[str, Any]]:
        """Returns each party's data of training, and no frames. Raises InputError if the rows were in memory."""
        sources = {name: known.source for name, known in origin.parts().items()}
        gone = [name for name, source in sources.items() if source.startswith(FRAME)]
        if gone:
            text = f"{self.folder}: the rows of {', '.join(gone)} were in memory in training; say which to predict"
            raise InputError(Code.DATA_INVALID, text)
        return dict(origin.data), {}

    def _new_rows(self, data: Mapping[str, Any], origin: Origin) -> tuple[dict[str, DataSettings], dict[str, Any]]:
        """Returns each party's data settings of training with the new rows as source, and {party: its frame}."""
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
            if (not self._has_features(name) if name in whole else known.columns == ())
        }
        for name, known in trained.items():
            of = name if name in data else next(iter(data)) if name in without else ""
            if not of:
                raise InputError(Code.DATA_INVALID, f"predict: rows of {name} are missing; the model needs its columns")
            given = data[of]
            found = given if isinstance(given, Data) else Data(given)
            if of != name:  # a party with labels only takes another's ids
                found = Data(found.frame, id=found.id or trained[of].id)
            is_source = isinstance(found.frame, str | Path)
            source = resolved(str(found.frame), Path()) if is_source else f"{FRAME}{name}"
            changes: dict[str, Any] = {"source": source, "limit": None, "unaligned": None}
            changes |= {key: getattr(trained[of], key) for key in ("id_rules", "duplicates")}
            changes |= {"id": tuple(id_columns(found.id))} if found.id else {}
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

    def plot(self) -> Figure:
        """Draws loss and metrics by round; a notebook shows the figure, ``.savefig(path)`` keeps it."""
        from vfl.report.charts import figure_of

        return figure_of(self._found)

    @property
    def _active(self) -> str:
        return next(each.name for each in self.summary.parties if each.role == "active")

    def _has_features(self, name: str) -> bool:
        """Whether a party has columns of its own, and not labels only."""
        place = self._recipe(name).party(name)
        return place is None or place.features

    def _recipe(self, name: str) -> Recipe:
        """Returns the run's recipe, as the folder of a party has it."""
        from vfl_common.run_folder import RunFolder

        return RunFolder(self.folder / name, self.folder.name).recipe()

    def _repr_html_(self) -> str:
        """Shows the tables of ``vfl report`` in a notebook."""
        from vfl.report.table import as_html, render

        return as_html(render(self.summary, self._found.phases))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.metrics.get('test') or self.metrics})"


def _in_order(found: dict[str, list[Any]], settings: DataSettings, frame: Any) -> dict[str, list[Any]]:
    """Returns predictions in the order of a frame, with its own ids; without one, as they are."""
    from vfl_party.data.frames import own_ids
    from vfl_party.data.ids import kept_rows

    if frame is None:
        return found
    texts, own = own_ids(frame, settings)
    rows = kept_rows(texts, settings.duplicates)
    place = {text: at for at, text in enumerate(found.pop("id"))}
    order = [place[texts[row]] for row in rows]
    ids = {name: [values[row] for row in rows] for name, values in own.items()}
    return ids | {name: [each[at] for at in order] for name, each in found.items()}
