"""A finished run: its numbers, curves, bytes, pictures and predictions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import Data
from vfl_common.config.data import FRAME, DataSettings, ids_only, resolved
from vfl_common.errors import Code, InputError
from vfl_common.summary import Bytes, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """A finished run in its folder.

    ``folder``: as ``vfl simulate`` leaves it, so that ``vfl report`` and ``vfl export`` take it, too.
    """

    def __init__(self, folder: Path, base: Path | None = None) -> None:
        """Use ``simulate`` or ``Run.load``. ``base``: the folder with the recipe's own modules."""
        from vfl.report.reading import find

        self._found = find(folder)
        self.folder, self._base = self._found.folder, base

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Opens the folder of a finished run. Raises VflError if it holds none.

        To predict with encoders of your own, have their modules where Python finds them.
        """
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

        name = party or next(each.name for each in self.summary.parties if each.role == "active")
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

    def predict(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Predicts new rows, with all parties in this process.

        Args:
            data: {party: its part of the rows}: a frame, ``vfl.Data``, or a path; one for each party that has features.
                The columns are those of training; no label is needed.

        Returns columns, in the order of the active party's rows if they are in memory, else sorted by id: the ids,
        under their column's name; ``value`` (regression), ``score`` and ``class`` (binary), or a ``score_…`` for each
        class and ``class``. Raises VflError.
        """
        import pyarrow.parquet

        from vfl.simulation.inprocess import predict_in_process
        from vfl_party.data import loading

        settings, frames = self._new_rows(data)
        with tempfile.TemporaryDirectory(prefix="vfl-") as place:
            output = Path(place) / "predictions.parquet"
            predict_in_process(
                self.folder, settings, output, Path(place) / "prediction", load=loading(frames), modules=self._base
            )
            found = pyarrow.parquet.read_table(output).to_pydict()
        active = next(each.name for each in self.summary.parties if each.role == "active")
        return _in_order(found, settings[active], frames.get(active))

    def _new_rows(self, data: Mapping[str, Any]) -> tuple[dict[str, DataSettings], dict[str, Any]]:
        """Returns each party's data settings of training with the new rows as source, and {party: its frame}."""
        trained = {each.name: self._data(each.name) for each in self.summary.parties if each.role != "server"}
        settings, frames = {}, {}
        if not isinstance(data, Mapping) or not data:
            raise InputError(Code.DATA_INVALID, "predict: give {party: its rows}")
        unknown = [name for name in data if name not in trained]
        if unknown:
            text = f"predict: {unknown[0]!r} is no party of the run (parties: {', '.join(trained)})"
            raise InputError(Code.DATA_INVALID, text)
        without = {name for name, known in trained.items() if not self._has_features(name)}
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
            changes = {**({"id": found.id} if found.id else {}), "source": source, "limit": None, "unaligned": None}
            settings[name] = known.model_copy(update=changes)
            if name in without:
                settings[name] = ids_only(settings[name])
            if not is_source:
                frames[name] = found.frame
        return settings, frames

    def plot(self) -> Figure:
        """Draws loss and metrics by round; a notebook shows the figure, ``.savefig(path)`` keeps it."""
        from vfl.report.charts import figure_of

        return figure_of(self._found)

    def _data(self, name: str) -> DataSettings:
        """Returns what a party's data was in training."""
        from vfl_common.config.base import read_toml

        noted, written = self.folder / name / "data.json", self.folder / "federation" / f"{name}.toml"
        if noted.exists():
            return DataSettings.model_validate(json.loads(noted.read_text(encoding="utf-8")))
        if written.exists():
            return DataSettings.model_validate(read_toml(written)["data"])
        text = f"{self.folder}: does not say what data {name} had; predict a run of separate machines with vfl-party"
        raise InputError(Code.FILE_INVALID, text)

    def _has_features(self, name: str) -> bool:
        """Whether a party has columns of its own, and not labels only."""
        from vfl_common.run_folder import RunFolder

        place = RunFolder(self.folder / name, self.folder.name).recipe().party(name)
        return place is None or place.features

    def _repr_html_(self) -> str:
        """Shows the tables of ``vfl report`` in a notebook."""
        from vfl.report.table import as_html, render

        return as_html(render(self.summary, self._found.phases))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.metrics.get('test') or self.metrics})"


def _in_order(found: dict[str, list[Any]], settings: DataSettings, frame: Any) -> dict[str, list[Any]]:
    """Returns predictions in the order of a frame, with its own ids; without one, as they are."""
    from vfl_party.data.frames import own_ids

    if frame is None:
        return found
    texts, values = own_ids(frame, settings)
    place = {text: at for at, text in enumerate(found.pop("id"))}
    order = [place[text] for text in texts]
    return {settings.id or "id": values, **{name: [each[at] for at in order] for name, each in found.items()}}
