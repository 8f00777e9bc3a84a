"""Runs a recipe with different values, one run after the other or in parallel, and compares the
runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from vfl.jobs import check_jobs, open_pool, open_waiting_threads
from vfl.library import cells
from vfl.library.data import add_data
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.run import Run
from vfl.library.simulate import RUN_FUNCTION, carry_out, convert_errors, simulate
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import divide
from vfl_common.config.sources import FRAME, is_path
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import write_atomic
from vfl_lab.studies.comparison import Difference, compute_overlap, difference, format_axis_value
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The key of ``over`` that is not a key of the recipe.
_BASELINE = "baseline"
# Seconds between two checks for Ctrl-C, because another thread may receive the signal.
_TICK_S = 0.2
# The metrics to draw by default; the first metric that all runs have is used.
_GOOD = ("accuracy", "auc", "f1", "rmse", "loss")


@dataclass(frozen=True)
class Study:
    """The finished runs of a study.

    ``over``: {key of the recipe: its values}. ``values``: the values of each run in ``runs``.
    ``plugins``: the plug-ins of the call.
    """

    over: Mapping[str, Sequence[Any]]
    values: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]
    plugins: RunPlugins | None = None

    def columns(self) -> dict[str, list[Any]]:
        """Returns one row for each run, as columns: the keys of ``over``, ``seed``,
        ``validation auc``, ``test auc``, ….

        ``pandas.DataFrame(study.columns())`` accepts these columns. A metric that a run does not
        have is None.
        """
        metrics = [
            {f"{s} {n}": v for s, named in run.metrics.items() for n, v in named.items()}
            for run in self.runs
        ]
        names = dict.fromkeys(name for row in metrics for name in row)
        keys = dict.fromkeys(key for values in self.values for key in values)
        return {
            **{key: [values.get(key) for values in self.values] for key in keys},
            **{name: [row.get(name) for row in metrics] for name in names},
        }

    def compare(self, first: Any, second: Any, metric: str) -> Difference:
        """Compares two values of a study by the differences between runs with the same seed and
        fold.

        Args:
            first: a value of the only key of ``over``; for several keys, {key: value} with all
                keys.
            second: the value to compare with ``first``.
            metric: a metric of the validation or test rows, such as ``test auc``.

        Returns the mean difference, its interval of 95 % confidence, and whether the first is
        better; its text is the whole result. With fewer than three pairs of runs there is no
        interval. The interval is corrected for training rows that runs share (Nadeau and Bengio
        2003). One interval of many is likely to miss: correct several with
        ``vfl_lab.studies.comparison.holm``, or choose by validation rows and compare by test rows
        once.
        Raises VflError.
        """
        from vfl_party.models.metrics import lower_is_better

        columns = self.columns()
        split, _, name = metric.partition(" ")
        if split not in ("validation", "test") or metric not in columns:
            known = [name for name in columns if name.startswith(("validation ", "test "))]
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: no run has the metric {metric!r}. Choose one of "
                f"{', '.join(known) or 'none'}.",
            )
        first_runs, second_runs = self._find_runs(first), self._find_runs(second)
        pairs = [
            (columns[metric][first_runs[key]], columns[metric][second_runs[key]])
            for key in first_runs
            if key in second_runs
        ]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not pairs:
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: no seed has runs of both values with {metric!r}. Run both with the "
                "same seeds.",
            )
        recipe = self.runs[next(iter(first_runs.values()))].settings
        with with_plugins(self.plugins):
            lower = lower_is_better(recipe.task, name)
        return difference(
            metric,
            *zip(*pairs, strict=True),
            overlap=compute_overlap(recipe, split),
            lower_is_better=lower,
        )

    def _find_runs(self, chosen: Any) -> dict[tuple[Any, ...], int]:
        """Returns {(seed, fold): number of the run} for the runs with the chosen values."""
        keys = list(self.over)
        if len(keys) == 1 and chosen in list(self.over[keys[0]]):
            chosen = {keys[0]: chosen}
        if not isinstance(chosen, Mapping) or set(chosen) != set(keys):
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: the study has no such value (got {chosen!r}). Give a value of "
                f"{keys[0]} that the study has."
                if len(keys) == 1
                else f"compare: must have a value for each key (got {chosen!r}). Give {{key: "
                f"value}} with {', '.join(keys)}.",
            )
        runs = {
            (values.get("seed"), values.get("fold")): number
            for number, values in enumerate(self.values)
            if all(values[key] == value for key, value in chosen.items())
        }
        if not runs:
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: the study has no run with {_format_values(chosen)}. Give values that "
                "the study has.",
            )
        return runs

    def plot(self, metric: str | None = None) -> Figure:
        """Draws a metric over the first key of ``over``, with a line for each value of the second
        key, averaged over the other keys, seeds and folds.

        ``metric``: for example ``validation auc``; by default, a metric of the validation rows that
        all runs have. Raises VflError if no run has the metric.
        """
        from vfl_lab.studies.chart import draw_values

        columns = self.columns()
        metric_name = metric or self._choose_metric(columns)
        if metric_name not in columns or all(value is None for value in columns[metric_name]):
            known = ", ".join(name for name in columns if " " in name)
            raise InputError(
                Code.CONFIG_INVALID,
                f"plot: no run has the metric {metric_name!r}. Choose one of {known}.",
            )
        return draw_values(self.over, self.values, metric_name, columns[metric_name])

    def _choose_metric(self, columns: Mapping[str, Sequence[Any]]) -> str:
        complete = [name for name, values in columns.items() if None not in values]
        for split in ("validation", "train", "test"):
            for name in _GOOD:
                if f"{split} {name}" in complete:
                    return f"{split} {name}"
        return "validation accuracy"

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Run]]:
        return iter(zip(self.values, self.runs, strict=True))

    def __repr__(self) -> str:
        return f"Study({len(self)} runs over {', '.join(self.over)})"

    def _repr_html_(self) -> str:
        columns = self.columns()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_format(value))}</td>" for value in row) + "</tr>"
            for row in zip(*columns.values(), strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def study(
    recipe: GivenRecipe,
    over: Mapping[str, Sequence[Any]],
    data: Mapping[str, Any] | None = None,
    *,
    plugins: RunPlugins | None = None,
    seeds: Sequence[int] | None = None,
    folds: int | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    jobs: int = 1,
    backend: str | None = None,
) -> Study:
    """Runs a recipe with every combination of values, and each combination with every seed.

    Args:
        recipe: as in ``simulate``.
        over: {key: values}, with keys as in ``Recipe.replace``: ``{"phases.splitnn.optimizer.lr":
            [0.001, 0.01]}``. The key ``baseline`` compares the federation with baselines, which
            are named as in ``simulate``: ``{"baseline": [None, "alone", "combined", "gbdt"]}``.
            None is the federation.
        data: as in ``simulate``.
        plugins: as in ``simulate``; with ``jobs``, only objects that other processes can import.
        seeds: the seeds; by default the recipe's seed.
        folds: the number of parts of the rows for cross-validation. With every combination and
            seed, each part is the test set once; this replaces ``rows.test``.
        out: the folder of runs, as in ``simulate``. A run that a study has finished in this folder
            is not made again if it has the same recipe, baseline and rows. Files are compared by
            size and time; databases and modules only by name, so use another folder when their
            contents change. Runs with ``plugins``, or with an encoder that is defined in a notebook
            or script, are always made again.
        quiet: whether to show no progress.
        jobs: the number of runs at a time. With 1, the runs are made in this process; otherwise in
            as many other processes, each with all parties of a run. The results are the same. Each
            process needs the memory of a run, and ``simulate.threads`` cores.
        backend: the name of a joblib backend whose processes make the runs: ``loky`` (on this
            machine), ``dask`` (on the workers of the connected ``Client``), or another registered
            backend. On several machines, ``out``, the files of rows and the modules must have the
            same paths on all machines.

    Choose values by the metrics of the validation rows, because a choice by the test rows biases
    the test metrics. Raises VflError before the first run if a combination is not a valid recipe,
    or later if a run fails.
    """
    loaded = Recipe.of(recipe)
    if not all(isinstance(v, Iterable) and not isinstance(v, str) for v in over.values()):
        raise InputError(Code.CONFIG_INVALID, "over: values must be lists. Give {key: [values]}.")
    over = {key: v.tolist() if hasattr(v, "tolist") else list(v) for key, v in over.items()}
    if not over or not all(over.values()):
        raise InputError(
            Code.CONFIG_INVALID, "over: is empty. Give {key: [values]}, with a value for each key."
        )
    if "fold" in over:
        raise InputError(
            Code.CONFIG_INVALID,
            "over: fold is not a key. Give folds, or the keys rows.folds and rows.fold.",
        )
    if isinstance(seeds, str) or not isinstance(seeds, Iterable | None):
        raise InputError(
            Code.CONFIG_INVALID,
            f"seeds: must be integers (got {seeds!r}). Give a list like [1, 2, 3].",
        )
    all_seeds = [None] if seeds is None else list(seeds)
    if not all_seeds:
        raise InputError(
            Code.CONFIG_INVALID,
            "seeds: is empty. Give a seed, or leave seeds out to use the recipe's seed.",
        )
    if "seed" in over and seeds is not None:
        raise InputError(
            Code.CONFIG_INVALID, "over: seed is given twice. Remove it, or the argument seeds."
        )
    values = [
        dict(zip(over, chosen, strict=True))
        | ({} if seed is None else {"seed": seed})
        | ({} if fold is None else {"fold": fold})
        for chosen in itertools.product(*over.values())
        for seed in all_seeds
        for fold in _list_folds(folds)
    ]
    _check_baselines(over.get(_BASELINE, []))
    # All recipes are checked before the first run.
    recipes = [_make_recipe(loaded, chosen, folds) for chosen in values]
    planned = []
    for number, (chosen, with_values) in enumerate(zip(values, recipes, strict=True), start=1):
        title = f"run {number} of {len(values)}: {_format_values(chosen)}"
        planned.append(_PlannedRun(with_values, chosen.get(_BASELINE), title))
    print_line = _ignore_text if quiet else make_printer()
    # The process may change its working directory during the study.
    runs_folder = Path(out).absolute() if out is not None else None
    max_jobs = check_jobs(jobs)
    memory = _FinishedRuns(runs_folder if plugins is None else None, data)
    finished = {n: run for n, run in enumerate(map(memory.find, planned)) if run is not None}
    remaining = [plan for number, plan in enumerate(planned) if number not in finished]
    if finished:
        print_line(f"{len(finished)} of {len(planned)} runs are finished already: {runs_folder}")
    runs: list[Run] = []
    with with_plugins(plugins):
        if (parallel := min(max_jobs, len(remaining))) > 1 or (remaining and backend is not None):
            with convert_errors():
                runs = _run_in_parallel(
                    parallel, backend, remaining, data, runs_folder, memory, print_line
                )
        else:
            for plan in remaining:
                print_line(plan.title)
                with plan.add_title():
                    runs.append(
                        simulate(
                            plan.recipe, data, baseline=plan.baseline, out=runs_folder, quiet=True
                        )
                    )
                    memory.note(plan, runs[-1])
    new_runs = iter(runs)
    all_runs = tuple(finished.get(number) or next(new_runs) for number in range(len(planned)))
    return Study(dict(over), tuple(values), all_runs, plugins)


@dataclass(frozen=True)
class _PlannedRun:
    recipe: Recipe
    baseline: str | None
    title: str

    @contextlib.contextmanager
    def add_title(self) -> Iterator[None]:
        """Adds the run's title to an error."""
        try:
            yield
        except VflError as error:
            error.add_note(f"in {self.title}")
            raise


class _FinishedRuns:
    """Finds and records the finished runs of studies in a folder. Without a folder, it does
    nothing.
    """

    def __init__(self, out: Path | None, data: Mapping[str, Any] | None) -> None:
        self._finished = FinishedRuns(out) if out is not None else None
        self._data, self._fingerprints = data or {}, Fingerprints()

    def find(self, planned: _PlannedRun) -> Run | None:
        """Returns the finished run of a plan; None if there is none."""
        inputs = self._inputs(planned)
        folder = self._finished.find(inputs) if self._finished is not None and inputs else None
        return Run.load(folder) if folder is not None else None

    def note(self, planned: _PlannedRun, run: Run) -> None:
        """Records a run that has just finished."""
        inputs = self._inputs(planned)
        if self._finished is not None and inputs:
            self._finished.note(run.folder, inputs)

    def _inputs(self, planned: _PlannedRun) -> str | None:
        """Returns the digest of a run's inputs; None if the run is always made again."""
        recipe = planned.recipe
        if self._finished is None or cells.find_unimportable_model(recipe.settings) is not None:
            return None
        with planned.add_title():
            tables, frames = add_data(recipe.to_dict(), self._data)
            settings = parse(Settings, tables, "recipe")
            data = divide(settings, recipe.base)
            return compute_inputs_digest(
                settings, data, planned.baseline, self._fingerprints, frames
            )


def _run_in_parallel(
    jobs: int,
    backend: str | None,
    planned: Sequence[_PlannedRun],
    data: Mapping[str, Any] | None,
    out: Path | None,
    memory: _FinishedRuns,
    print_line: Callable[[str], None],
) -> list[Run]:
    """Makes runs in ``jobs`` other processes, and returns them in the order of ``planned``. The
    first error ends all runs.
    """
    from vfl.library.simulate import send

    simulate = planned[0].recipe.settings.simulate
    threads_each = simulate.threads if simulate is not None else 1
    with open_pool(RUN_FUNCTION, jobs, threads_each, backend) as workers:

        def make(plan: _PlannedRun) -> Run:
            print_line(plan.title)
            with plan.add_title():
                run = carry_out(
                    plan.recipe, data, partial(send, workers), baseline=plan.baseline, out=out
                )
                memory.note(plan, run)
                return run

        with open_waiting_threads(workers, jobs) as threads:
            # A new thread does not inherit the context variables of this one.
            futures = [threads.submit(copy_context().run, make, plan) for plan in planned]
            remaining = set(futures)
            while remaining:
                done, remaining = wait(remaining, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        return [future.result() for future in futures]


def _list_folds(folds: Any) -> list[int | None]:
    if folds is None:
        return [None]
    number = folds if isinstance(folds, SupportsIndex) and not isinstance(folds, bool) else 0
    if operator.index(number) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"folds: must be an integer of at least 2 (got {folds!r}). Give the number of parts.",
        )
    return [*range(1, operator.index(number) + 1)]


def _make_recipe(recipe: Recipe, values: Mapping[str, Any], folds: int | None) -> Recipe:
    """Returns the recipe of a run with the given values. A fold replaces ``rows.test``."""
    study_keys = (_BASELINE, "fold")
    changed = recipe.replace({key: value for key, value in values.items() if key not in study_keys})
    if folds is None:
        return changed
    rows = {key: value for key, value in changed.to_dict().get("rows", {}).items() if key != "test"}
    return changed.replace({"rows": rows | {"folds": int(folds), "fold": values["fold"]}})


def _format_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {format_axis_value(value)}" for key, value in values.items())


def _ignore_text(_text: str) -> None: ...


def make_printer() -> Callable[[str], None]:
    """Returns a function that writes a line to standard error. Its modules are imported here,
    because imports in several threads may conflict.
    """
    from rich.console import Console

    return partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)


def _check_baselines(baselines: Iterable[Any]) -> None:
    from vfl.simulation import BASELINES

    for baseline in baselines:
        if baseline is not None and baseline not in BASELINES:
            raise InputError(
                Code.CONFIG_INVALID,
                f"over: unknown baseline {baseline!r}. Give None (the federation), or one of "
                f"{', '.join(BASELINES)}.",
            )


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# The file in a run's folder that contains the digest of its inputs.
FILE = "study.json"


class FinishedRuns:
    """The finished runs in a folder. Raises InputError if a file with a digest is damaged."""

    def __init__(self, out: Path) -> None:
        self._folders: dict[str, Path] = {}
        for note in sorted(out.glob(f"*/{FILE}")):
            # Runs without a summary are unfinished, and are repeated.
            if (note.parent / "summary.json").exists():
                self._folders[_read_digest(note)] = note.parent

    def find(self, inputs: str) -> Path | None:
        """Returns the folder of the finished run whose inputs have this digest, or None."""
        return self._folders.get(inputs)

    def note(self, folder: Path, inputs: str) -> None:
        """Writes the digest of its inputs into the folder of a finished run. Raises InputError."""
        write_atomic(folder / FILE, json.dumps({"inputs": inputs}) + "\n")
        self._folders[inputs] = folder


def _read_digest(note: Path) -> str:
    try:
        inputs = json.loads(note.read_bytes())["inputs"]
        if isinstance(inputs, str):
            return inputs
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{note}: cannot be read ({error.strerror}). Make the file readable.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InputError(
        Code.FILE_INVALID, f"{note}: is damaged. Restore the file, or remove it to repeat the run."
    )


def compute_inputs_digest(
    recipe: Settings,
    data: Mapping[str, DataSettings],
    baseline: str | None,
    prints: Fingerprints,
    frames: Mapping[str, Any],
) -> str:
    """Returns a digest of the inputs that determine a run's results: recipe, baseline and rows.

    A file is represented by its size and the time of its last change. The code of a named encoder
    and the rows of a database are not part of the digest. ``frames``: {party: data frame}.
    """
    parts = [
        recipe.canonical_json(),
        str(baseline),
        *(
            f"{name} {settings.model_dump_json()} {prints.compute(settings, frames)}"
            for name, settings in data.items()
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Fingerprints:
    """Computes fingerprints of data sources, and caches them so that each source is read once."""

    def __init__(self) -> None:
        self._cache: dict[str, str] = {}

    def compute(self, data: DataSettings, frames: Mapping[str, Any]) -> str:
        """Returns the fingerprint of a source as text. Equal rows have equal fingerprints."""
        source = data.source
        if source not in self._cache:
            if source.startswith(FRAME):
                name = source.removeprefix(FRAME)
                self._cache[source] = _hash_frame(frames[name], source, data)
            else:
                self._cache[source] = _hash_files(Path(source)) if is_path(source) else ""
        return self._cache[source]


def _hash_files(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    lines = []
    for file in files:
        # A missing file is ignored here: the run that reads it raises the error.
        with contextlib.suppress(OSError):
            stat = file.stat()
            lines.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Digest:
    """A writable file object that computes the SHA-256 digest of the written bytes."""

    closed = False

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _hash_frame(frame: Any, source: str, data: DataSettings) -> str:
    import numpy as np
    import pyarrow

    from vfl_party.data.sources.frames import as_arrow, is_arrays

    digest = _Digest()
    if is_arrays(frame):
        for name, array in frame.items():
            array = np.ascontiguousarray(array)
            digest.write(f"{name} {array.dtype} {array.shape} ".encode())
            # The bytes of an object array are pointers, so its values are hashed as text.
            digest.write(
                repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            )
        return digest.sha256.hexdigest()
    table = as_arrow(frame, source, data.id).combine_chunks()
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(digest, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return digest.sha256.hexdigest()
