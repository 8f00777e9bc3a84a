"""Runs a recipe in this process, in one process for each party, or as an order to another process
(``vfl.jobs``), which then makes the whole run with all parties in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.jobs import WorkerPool, open_pool
from vfl.library import cells
from vfl.library.data import add_data, write_frames
from vfl.library.model import OnRound, RoundReporter, read_round_models
from vfl.library.plugins import get_import_paths, import_plugins, with_plugins, write_entry_points
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.run import Run
from vfl.simulation.baselines import baseline as baseline_of
from vfl.simulation.federation import Origin
from vfl.simulation.run import new_run_id
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import divide, get_simulate_settings
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_common.files import require_folder
from vfl_party.base.plugins import RunPlugins, get_run_plugins, use_plugins

if TYPE_CHECKING:
    from vfl.simulation.inprocess import Attach
    from vfl.summary.rounds import RoundLine


def simulate(
    recipe: GivenRecipe,
    data: Mapping[str, Any] | None = None,
    *,
    plugins: RunPlugins | None = None,
    processes: bool = False,
    baseline: str | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    on_round: OnRound | None = None,
) -> Run:
    """Runs the server and all parties of a recipe on this machine, and returns the finished run.

    Args:
        recipe: a recipe, a dict of its tables, or the path of its file; or the paths of all
            parties' files, as a list.
        data: {party: its rows}, as a frame, ``vfl.Data`` (which also names the columns of ids and
            labels), or a path. The active party's rows have the label. By default, the data that
            the recipe names under ``simulate`` are used.
        plugins: {group: {name: object}}, your own functions and classes for names in the recipe:
            ``{"metrics": {"brier": brier}}``. The groups and the types of objects are those of
            entry points (without ``vfl.``). With ``processes``, other processes must be able to
            import the objects from a module.
        processes: whether each party is a separate process that uses gRPC, as with
            ``vfl simulate``; otherwise all parties run in this process. The results are the same,
            bit for bit.
        baseline: a baseline to run instead of the federation, on the same rows: ``alone`` (the
            active party trains by itself), ``combined`` (one party has all columns), ``gbdt``
            (boosted trees over all columns) or ``gbdt-alone`` (boosted trees over the active
            party's columns).
        out: the folder of runs, in which a folder for this run is made. By default, the run's files
            are temporary, and are removed together with the ``Run`` object.
        quiet: whether to show no progress on standard error.
        on_round: called after each round of each party, and again for a round that is repeated.
            With ``processes``, it is called a moment later. An exception that it raises ends the
            run, and is raised unchanged.

    Raises VflError if the input is invalid, or a party failed. For your own encoder, the traceback
    contains the line that failed.
    """
    how = partial(_in_processes if processes else in_process, quiet, on_round)
    with with_plugins(plugins):
        return carry_out(Recipe.of(recipe), data, how, baseline=baseline, out=out)


@dataclass(frozen=True)
class Order:
    """A run to make.

    ``tables``: the tables of the recipe to run. ``base``: the folder to which its paths are
    relative. ``folder``: the folder of the run, which does not exist yet. ``frames``: {party: its
    frame}. ``federation``: the tables of the federation's recipe, which names the parties of
    ``frames``; they differ from ``tables`` for a baseline.
    """

    tables: dict[str, Any]
    settings: Settings
    data: Mapping[str, DataSettings]
    base: Path
    folder: Path
    federation: dict[str, Any]
    baseline: str | None
    frames: Mapping[str, Any]

    def in_files(self, instead: str) -> dict[str, Any]:
        """Writes the frames to files in the run's folder for other processes, and returns the
        tables that name these files.

        ``instead``: an argument without which the run needs other processes. Raises InputError, for
        example if other processes cannot import an encoder.
        """
        cells.require_importable(self.settings, "other processes", instead)
        if not self.frames:
            return self.tables
        settings = parse(Settings, self.federation, "recipe")
        tables = _write_data(self.federation, settings, self.base, self.folder, self.frames)
        return _select_recipe(tables, self.baseline, self.base)[0]


def carry_out(
    recipe: Recipe,
    data: Mapping[str, Any] | None,
    how: Callable[[Order], None],
    *,
    baseline: str | None,
    out: str | Path | None,
) -> Run:
    """Makes a run by a call of ``how`` with the order, and returns the run.

    The other arguments are those of ``simulate``. Raises VflError.
    """
    federation, frames = add_data(recipe.to_dict(), data or {})
    parse(Settings, federation, "recipe")
    tables, settings = _select_recipe(federation, baseline, recipe.base)
    data_settings = divide(settings, recipe.base)
    with _open_runs_folder(out) as (runs_folder, is_temporary):
        folder = runs_folder / new_run_id(settings.name, baseline)
        how(
            Order(
                tables, settings, data_settings, recipe.base, folder, federation, baseline, frames
            )
        )
        run = Run(folder, get_run_plugins())
        if is_temporary:
            weakref.finalize(run, _remove, runs_folder, os.getpid())
        return run


def _select_recipe(
    tables: dict[str, Any], baseline: str | None, base: Path
) -> tuple[dict[str, Any], Settings]:
    """Returns the recipe to run, as tables and parsed: the federation's recipe, or that of a
    baseline.
    """
    if baseline is not None:
        tables = baseline_of(tables, baseline, base, "recipe")
    return tables, parse(Settings, tables, "recipe")


def _remove(place: Path, pid: int) -> None:
    """Removes a run's temporary folder, except in a fork of the process that made the folder."""
    if os.getpid() == pid:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _open_runs_folder(out: str | Path | None) -> Iterator[tuple[Path, bool]]:
    """Yields the folder of runs, and whether it is temporary. If the run fails, a temporary folder
    is removed.
    """
    if out is not None:
        require_folder(Path(out))
        yield Path(out), False
        return
    place = Path(tempfile.mkdtemp(prefix="vfl-"))
    try:
        yield place, True
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def in_process(
    quiet: bool,
    on_round: OnRound | None,
    order: Order,
    attach: Attach | None = None,
    secrets: Mapping[str, bytes] | None = None,
) -> None:
    """Makes a run in this process. The arguments are those of ``simulate`` and ``run_in_process``.
    Raises VflError.
    """
    from vfl.simulation.inprocess import run_in_process
    from vfl.simulation.live import View, make_view
    from vfl_party.data import make_loader

    observe = RoundReporter(on_round) if on_round is not None else None
    Origin(order.base, order.data).note(order.folder)
    with (
        View(order.settings) if quiet else make_view(order.settings) as screen,
        convert_errors(observe),
    ):
        run_in_process(
            order.settings,
            order.data,
            order.folder,
            load=make_loader(order.frames),
            modules=order.base,
            show=screen.show,
            observe=observe,
            attach=attach,
            secrets=secrets,
        )


def run_files(tables: dict[str, Any], base: Path, folder: Path) -> None:
    """Runs a recipe whose data are in files, in this process. ``folder``: the folder of the run.
    Raises VflError.
    """
    settings = parse(Settings, tables, "recipe")
    in_process(
        True, None, Order(tables, settings, divide(settings, base), base, folder, tables, None, {})
    )


class convert_errors:  # noqa: N801 - reads as a word in a with statement
    """Converts exceptions of the ``with`` block to VflError, with the original as the cause.

    A VflError, an interruption and an exception of ``on_round`` are not converted.
    """

    def __init__(self, telling: RoundReporter | None = None) -> None:
        self._telling = telling

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if (
            isinstance(error, Exception)
            and not isinstance(error, VflError)
            and (self._telling is None or error is not self._telling.error)
        ):
            raise InternalError(f"{type(error).__name__}: {error}") from error


def _write_data(
    tables: dict[str, Any], settings: Settings, base: Path, folder: Path, frames: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes frames to files in the run's folder, and returns a recipe's tables that name them.
    Raises InputError.
    """
    from vfl_party.data import make_loader

    load, active = make_loader(frames), settings.active.name
    for name, of_party in divide(settings, base).items():
        if name in frames:
            # Loading the frame raises its errors before any process starts.
            rows = settings.rows
            load(of_party.with_id_rules(rows), name == active)
    parties = write_frames(frames, tables["simulate"]["parties"], folder / "federation" / "data")
    return {**tables, "simulate": tables["simulate"] | {"parties": parties}}


def _in_processes(quiet: bool, on_round: OnRound | None, order: Order) -> None:
    from vfl.launcher.forks import run_launcher
    from vfl.simulation.federation import add_rejoin_deadline
    from vfl.simulation.live import View, make_view
    from vfl.simulation.run import run_federation

    telling = RoundReporter(on_round) if on_round is not None else None
    with convert_errors(telling):
        named = get_import_paths("processes=False")
        tables = add_rejoin_deadline(order.in_files("processes=False"))
        settings = parse(Settings, tables, "recipe")
        threads, folder = get_simulate_settings(settings).threads, order.folder

        def tell(party: str, line: RoundLine) -> None:
            if telling is not None:
                place = party, line.phase, line.round
                last = line.round == line.rounds
                models = partial(read_round_models, folder, settings, *place, last=last)
                telling(*place, line.rounds, line.metrics, models)

        modules = write_entry_points(named, folder / "federation" / "plugins")
        with (
            run_launcher(threads) as launcher,
            View(settings) if quiet else make_view(settings) as screen,
        ):
            run_federation(
                json.loads(json.dumps(tables)),
                settings,
                order.base,
                folder,
                screen,
                launcher,
                modules=modules,
                on_line=tell if telling is not None else None,
            )


# The function that makes a run, by the name under which other processes import it.
RUN_FUNCTION = "vfl.library.simulate:make"


def send(pool: WorkerPool, order: Order) -> None:
    """Makes a run in a process of ``pool``, which carries out orders with ``RUN_FUNCTION``, and
    waits for its end. Raises VflError.
    """
    tables, plugins = order.in_files("jobs=1"), get_import_paths("jobs=1")
    _send(pool, tables, order.base, order.folder, plugins)


def _send(
    pool: WorkerPool,
    tables: dict[str, Any],
    base: Path,
    folder: Path,
    plugins: dict[str, dict[str, str]],
) -> None:
    pool.run(
        {
            "recipe": tables,
            "base": str(base.resolve()),
            "folder": str(folder.resolve()),
            "plugins": plugins,
        }
    )
    if not (folder / "summary.json").exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: the run was made on another machine, which does not share this folder. Set "
            "out to a folder that all machines share.",
        )


@contextlib.contextmanager
def open_run_maker(
    jobs: int, backend: str | None = None
) -> Iterator[Callable[[dict[str, Any], Path, Path], None]]:
    """Yields a function that makes a run of a study in another process (a ``Make`` function of
    ``vfl_lab.studies.run``). The arguments are those of ``open_pool``.
    """
    with open_pool(RUN_FUNCTION, jobs, 1, backend) as pool:
        yield lambda recipe, base, folder: _send(pool, recipe, base, folder, {})


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process. ``order``: the request that ``_send`` sent."""
    folder = clear_folder(order["folder"])
    with use_plugins(import_plugins(order["plugins"])):
        run_files(order["recipe"], Path(order["base"]), folder)


def clear_folder(path: str) -> Path:
    """Removes the files of a lost process from the folder of a run, and returns the folder.

    A backend may start an order again. The folder ``federation`` with the rows is kept, because the
    rows were written before the order was sent.
    """
    folder = Path(path)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name != "federation":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder
