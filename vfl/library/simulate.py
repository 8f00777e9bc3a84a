"""Runs a recipe in this process or in one process for each party."""

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

from vfl.library import cells
from vfl.library.data import with_data, write_frames
from vfl.library.plugins import get_import_paths, with_plugins, write_entry_points
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.rounds import OnRound, Telling, of_checkpoint
from vfl.library.run import Run
from vfl.simulation.baselines import baseline as baseline_of
from vfl.simulation.origin import Origin
from vfl.simulation.run import new_run_id
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.division import divide, settings_of
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import InternalError, VflError
from vfl_common.files import require_folder
from vfl_party.base.plugins import RunPlugins, get_run_plugins

if TYPE_CHECKING:
    from vfl.report.rounds import RoundLine
    from vfl.simulation.inprocess import Attach


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
        data: {party: its rows}: a frame, ``vfl.Data`` (which also names the columns of ids and
            labels), or a path. The active party's has the label. Without it, the recipe says under
            ``simulate`` where data lie.
        plugins: {group: {name: object}}: your own functions and classes, for names in the recipe:
            ``{"metrics": {"brier": brier}}``. The groups are those of entry points, without
            ``vfl.``; so is what an object may be. With ``processes``, only objects that other
            processes can import, by their names in a module.
        processes: whether each party is a separate process, over gRPC, as under ``vfl simulate``;
            otherwise each is a part of this process. Both compute the same, bit for bit.
        baseline: what to run instead of the federation, on the same rows: ``alone`` (the active
            party trains by itself), ``combined`` (one party has all columns), ``gbdt`` (boosted
            trees over all columns) or ``gbdt-alone`` (over the active party's).
        out: the folder of runs; a new one is made in it. Without it, the run's files go when the
            ``Run`` does.
        quiet: whether to show nothing on standard error while the run goes on.
        on_round: called after each round of each party, with ``processes`` a moment later, and
            again for a round that is repeated. What it raises ends the run, and comes out as it
            is.

    Raises VflError: bad input, or a party that failed. Its traceback leads to the line of an
    encoder of your own.
    """
    how = partial(_in_processes if processes else in_process, quiet, on_round)
    with with_plugins(plugins):
        return carry_out(Recipe.of(recipe), data, how, baseline=baseline, out=out)


@dataclass(frozen=True)
class Order:
    """A run to make.

    ``tables``: those of the recipe to run, with relative paths from ``base``. ``folder``: the
    run's, which does not exist yet. ``frames``: {party: its frame}; ``federation``: the tables of
    the recipe that names these parties, which differ from ``tables`` for a baseline.
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
        """Returns the tables with frames as files in the run's folder, for other processes.

        Raises InputError, also if only this process has an encoder; ``instead``: the argument with
        which it needs no files.
        """
        cells.refuse_here(self.settings, "other processes", instead)
        if not self.frames:
            return self.tables
        settings = parse(Settings, self.federation, "recipe")
        tables = _write_data(self.federation, settings, self.base, self.folder, self.frames)
        return _select(tables, self.baseline, self.base)[0]


def carry_out(
    recipe: Recipe,
    data: Mapping[str, Any] | None,
    how: Callable[[Order], None],
    *,
    baseline: str | None,
    out: str | Path | None,
) -> Run:
    """Has ``how`` make a run, and returns it; the other arguments are those of ``simulate``. Raises
    VflError.
    """
    federation, frames = with_data(recipe.to_dict(), data or {})
    parse(Settings, federation, "recipe")
    tables, settings = _select(federation, baseline, recipe.base)
    divided = divide(settings, recipe.base)
    with _place(out) as (place, goes):
        folder = place / new_run_id(settings.name, baseline)
        how(Order(tables, settings, divided, recipe.base, folder, federation, baseline, frames))
        run = Run(folder, get_run_plugins())
        if goes:
            weakref.finalize(run, _remove, place, os.getpid())
        return run


def _select(
    tables: dict[str, Any], baseline: str | None, base: Path
) -> tuple[dict[str, Any], Settings]:
    """Returns the recipe to run, as written and parsed: the federation's, or that of a baseline."""
    if baseline is not None:
        tables = baseline_of(tables, baseline, base, "recipe")
    return tables, parse(Settings, tables, "recipe")


def _remove(place: Path, pid: int) -> None:
    """Removes a run's temporary folder, unless this process was forked from the one that made
    it.
    """
    if os.getpid() == pid:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _place(out: str | Path | None) -> Iterator[tuple[Path, bool]]:
    """Yields the folder of runs, and whether it is to go with the run; it goes at once if the run
    fails.
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
    """Makes a run in this process; the arguments are those of ``simulate`` and ``run_in_process``.
    Raises VflError.
    """
    from vfl.simulation.inprocess import run_in_process
    from vfl.simulation.live import View, view
    from vfl_party.data import make_loader

    observe = Telling(on_round) if on_round is not None else None
    Origin(order.base, order.data).note(order.folder)
    with View(order.settings) if quiet else view(order.settings) as screen, ours(observe):
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
    """Runs a recipe whose data lie in files, in this process. ``folder``: of the run. Raises
    VflError.
    """
    settings = parse(Settings, tables, "recipe")
    in_process(
        True, None, Order(tables, settings, divide(settings, base), base, folder, tables, None, {})
    )


class ours:  # noqa: N801 - reads as a word in a with statement
    """Converts any other exception to a VflError, with the original as its cause.

    An interruption stays as it is, and so does an exception of ``on_round``.
    """

    def __init__(self, telling: Telling | None = None) -> None:
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
    """Returns a recipe's tables with frames as files in the run's folder. Raises InputError."""
    from vfl_party.data import make_loader

    load, active = make_loader(frames), settings.active.name
    for name, of_party in divide(settings, base).items():
        if name in frames:
            # Errors of a frame are raised at once.
            load(of_party, name == active)
    parties = write_frames(frames, tables["simulate"]["parties"], folder / "federation" / "data")
    return {**tables, "simulate": tables["simulate"] | {"parties": parties}}


def _in_processes(quiet: bool, on_round: OnRound | None, order: Order) -> None:
    from vfl.launcher.forks import launching
    from vfl.simulation.federation import on_one_machine
    from vfl.simulation.live import View, view
    from vfl.simulation.run import run_federation

    telling = Telling(on_round) if on_round is not None else None
    with ours(telling):
        named = get_import_paths("processes=False")
        tables = on_one_machine(order.in_files("processes=False"))
        settings = parse(Settings, tables, "recipe")
        threads, folder = settings_of(settings).threads, order.folder

        def tell(party: str, line: RoundLine) -> None:
            if telling is not None:
                place = party, line.phase, line.round
                last = line.round == line.rounds
                models = partial(of_checkpoint, folder, settings, *place, last=last)
                telling(*place, line.rounds, line.metrics, models)

        modules = write_entry_points(named, folder / "federation" / "plugins")
        with launching(threads) as launcher, View(settings) if quiet else view(settings) as screen:
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
