"""A finished run: its metrics, curves, bytes, figures and predictions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.plugins import with_plugins
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import read_recorded_recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import Bytes, Summary
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl.library.model import Model
    from vfl.report.reading import RunRecord
    from vfl.report.rounds import RoundLine


class _Metrics(dict[str, dict[str, float]]):
    """Explains in a KeyError why a split has no metrics."""

    def __missing__(self, split: str) -> dict[str, float]:
        splits = ", ".join(self) or "none"
        raise KeyError(
            f"no metrics of {split!r} rows (got {splits}). Add a phase of kind 'evaluate'."
        )


class Run:
    """A finished run in its folder.

    ``folder``: as ``vfl simulate`` leaves it, so that ``vfl report`` and ``vfl export`` take it,
    too.
    """

    def __init__(self, folder: Path, plugins: RunPlugins | None = None) -> None:
        """Use ``simulate`` or ``Run.load``."""
        from vfl.report.reading import find

        self._found = find(folder)
        self.folder = self._found.folder
        self._plugins = plugins

    @classmethod
    def load(cls, folder: str | Path, *, plugins: RunPlugins | None = None) -> Run:
        """Opens the folder of a finished run. ``plugins``: those with which it was made, as in
        ``simulate``, for its models and predictions. Raises VflError if it holds none.
        """
        return cls(Path(folder), plugins)

    @property
    def summary(self) -> Summary:
        """The contents of ``summary.json``."""
        return self._found.summary

    @property
    def settings(self) -> Settings:
        """The recipe that the run was made with, parsed; of a baseline, its own. Raises VflError if
        the active party's folder is not in the run's.
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
        """The traffic between the parties; ``bytes.total.payload_bytes`` is all tensors."""
        return self.summary.bytes

    def curves(self, party: str | None = None) -> dict[str, list[Any]]:
        """Returns the metrics round by round, as columns: ``phase``, ``round``, ``train loss``,
        ``validation auc``, ….

        ``pandas.DataFrame(run.curves())`` takes them as they are; a metric that a round lacks is
        None. ``party``: the party whose metrics; default: the active one. Raises VflError if its
        folder is not in the run's.
        """
        from vfl.report.reading import history

        name = party or self._active
        if not (self.folder / name / "run.json").exists():
            raise InputError(
                Code.FILE_INVALID,
                f"{self.folder}: the folder of {name} is missing. Copy it there, or name "
                "another party.",
            )
        rounds = history(self.folder / name)
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
        """Returns the message bytes of all parties until ``metric`` of the ``split`` rows was first
        at ``value`` or better; None if it never was (SS-VFL, Table 1).

        A round counts whole, with what it sends to validate. What a phase of kind ``evaluate``
        sends is left out. So are the bytes of a run that this one started from. Raises VflError if
        no round has the metric, or a party's folder is not in the run's.
        """
        return _bytes_to(self._found, self.settings, metric, value, split)

    @property
    def predictions(self) -> dict[str, list[Any]]:
        """The predictions behind the final metrics, as columns: ``phase``, ``split``, the ids,
        ``truth``, then scores.

        ``truth`` is as in the label's column; ids and scores are named as in ``predict``. Raises
        VflError if the active party's folder has none.
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
            data: {party: its part of the rows}: a frame, ``vfl.Data``, or a path; one for each
                party that has features, also for a baseline of their joined columns. The columns
                are those of training; no label is needed. Without it, the run's own rows are
                predicted. With ``rows.align = "psi"`` it is the rows that all parties hold that are
                predicted; with ``rows.partial`` all of the active party; with ``rows.align =
                "none"`` those of the active party that some other party has, each by the first that
                has it.
            output: a new file for the result: CSV or Parquet, by its ending. Only you may read it.
            without: passive parties that take no part; for a model that has learnt to do without a
                party (``subsets`` or ``party_dropout``), or of parties that hold different rows;
                results say in ``parties`` who took part.
            solo: whether the student that the run has trained scores the rows: then ``data`` has
                the active party's alone.

        Returns columns, with all rows of the active party, in their order: its own ids, under the
        names of their columns (with ``id_`` in front if a result has such a name itself), the ids
        by which the parties have matched them (``matched_<name>``), and ``state``: ``scored``, or
        why there is no score; ``value`` (regression); or ``class``, and a ``score_<class>`` for
        each class, of two for the positive one. Raises VflError.

        Warns (``UserWarning``) of categories that training did not have, and of numbers far outside
        its range.
        """
        from vfl.library.predicting import predict_rows
        from vfl_party.predict.results import Output

        to = Output(Path(output)) if output is not None else None
        with with_plugins(self._plugins):
            result = predict_rows(self.folder, data, to, without=without, solo=solo)
        for note in result.notes:
            warnings.warn(note, stacklevel=2)
        return result.columns

    def model(self, party: str | None = None) -> Model:
        """Returns a party's trained models, with the way to prepare rows for them; the active
        party's if not given.

        Raises VflError.
        """
        from vfl.library.model import Model

        return Model.load(self.folder, party, plugins=self._plugins)

    def plot(self) -> Figure:
        """Draws loss and metrics by round. A notebook shows the figure; ``.savefig(path)`` saves
        it.
        """
        from vfl.report.charts import figure_of

        return figure_of(self._found)

    @property
    def _active(self) -> str:
        return next(party.name for party in self.summary.parties if party.role == "active")

    def _repr_html_(self) -> str:
        """Shows the tables of ``vfl report`` in a notebook."""
        from vfl.report.table import as_html, render

        return as_html(render(self.summary, self._found.phases))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.metrics.get('test') or self.metrics})"


def _bytes_to(
    run: RunRecord, recipe: Settings, metric: str, value: float, split: str = "validation"
) -> int | None:
    """Returns the message bytes of the run until ``metric`` first reached ``value`` or better; None
    if it never did (SS-VFL, Table 1).

    They are the bytes that the parties had sent at the end of that round, and the averages of the
    server in the phases up to it. A phase of kind ``evaluate`` only measures: its own bytes are
    left out. Raises InputError if no round has the metric, or if a party's folder is missing.
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
    measuring = {phase.name for phase in recipe.phases if phase.kind == "evaluate"}
    # The last round so far that trained.
    trained: RoundLine | None = None
    for line in active:
        trained = trained if line.phase in measuring else line
        reached = line.metrics.get(split, {}).get(metric)
        if reached is not None and sign * reached >= sign * value:
            return 0 if trained is None else _count_until(run, recipe, rounds, trained)
    return None


def _read_rounds(run: RunRecord, name: str) -> list[RoundLine]:
    from vfl.report.reading import history

    rounds = history(run.folder / name)
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
    """Returns the bytes that were sent until the end of a round."""
    order = [phase.name for phase in recipe.phases]
    phases = order[: order.index(last.phase) + 1]
    end = len(phases) - 1, last.round
    sent = 0.0
    for own in rounds.values():
        done = [line for line in own if (order.index(line.phase), line.round) <= end]
        sent += done[-1].values["bytes/sent"] if done else 0.0
    roles = {party.name: party.role for party in run.summary.parties}
    averages = sum(
        link.message_bytes
        for link in run.summary.bytes.by_link
        if roles.get(link.sender) == "server" and link.phase in phases
    )
    return int(sent) + averages
