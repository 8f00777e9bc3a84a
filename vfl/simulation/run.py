"""Runs a whole federation on one machine: the server and every party of a recipe, each in its own
process.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.launcher.forks import Launcher, run_launcher
from vfl.launcher.processes import Process, ProcessFailed, end_all, find_culprit, parse_events
from vfl.simulation.baselines import baseline as baseline_of
from vfl.simulation.baselines import make_from_party_file
from vfl.simulation.federation import Federation, Origin, add_rejoin_deadline, combine_party_files
from vfl.simulation.live import View, make_view
from vfl.summary.rounds import History, PartyFolder, RoundLine
from vfl_common.config.base import detect_kind, parse, read_tables, read_toml
from vfl_common.config.recipe import Recipe, divide, get_simulate_settings, name_file_in_errors
from vfl_common.files import require_folder
from vfl_common.process.logs import NOTE_EVENTS, make_note_event
from vfl_common.process.program import watch_page
from vfl_common.psi import MAX_ROWS

# A callback that gets a party's name, and a line of its ``metrics.jsonl``.
OnLine = Callable[[str, RoundLine], None]

_TICK_S = 0.1
# Seconds for the other processes to end by themselves after a failure.
_GRACE_S = 10.0
# The same, if the other processes cannot notice the failure: before the start, or after a kill.
_SHORT_GRACE_S = 3.0
# Seconds for the parties to end after the server has ended.
_LINGER_S = 60.0
# The maximum number of restarts of each party.
_MAX_RESTARTS = 3


def simulate(
    recipe_path: Path,
    out: Path,
    *,
    others: Sequence[Path] = (),
    seed: int | None = None,
    keep_going: bool = False,
    baseline: str | None = None,
    watch: bool = False,
) -> Path:
    """Runs a recipe and returns the run's folder, which contains ``summary.json``.

    Args:
        recipe_path: a recipe with a [simulate] table, or a party file.
        others: the files of all other parties, if ``recipe_path`` is a party file. They are not
            needed for the baselines ``alone`` and ``gbdt-alone``.
        out: the folder of runs, in which a folder for this run is made.
        seed: replaces the recipe's seed.
        keep_going: whether to restart a party that was killed, so that it rejoins.
        baseline: a baseline of ``vfl.simulation.BASELINES`` to run instead of the federation.
        watch: whether to show the run in a browser while it goes on.

    Raises InputError if the recipe cannot be used, and ProcessFailed if a process of the federation
    failed.
    """
    is_single_party_file = not others and detect_kind(read_toml(recipe_path)) == "party file"
    if others:
        tables, base = combine_party_files([recipe_path, *others])
    elif is_single_party_file:
        tables, base = make_from_party_file(recipe_path, baseline), recipe_path.resolve().parent
    else:
        tables, base = read_tables(recipe_path, "recipe"), recipe_path.resolve().parent
    tables = add_rejoin_deadline(tables | ({} if seed is None else {"seed": seed}))
    if baseline is not None and not is_single_party_file:
        tables = baseline_of(tables, baseline, base, str(recipe_path))
    recipe = parse(Recipe, tables, str(recipe_path))
    folder = out / new_run_id(recipe.name, baseline)
    # Wrong settings are reported before anything starts.
    divide(recipe, base)
    with run_launcher(get_simulate_settings(recipe).threads) as launcher:
        # These checks run while the launcher imports the modules of the parties.
        check_phases(recipe, recipe_path)
        require_folder(out)
        with watch_page(folder, wanted=watch), make_view(recipe) as screen:
            screen.say(f"run {folder.name}: its files are in {folder}")
            run_federation(tables, recipe, base, folder, screen, launcher, keep_going=keep_going)
    return folder


def check_phases(recipe: Recipe, path: Path) -> None:
    """Raises InputError if the phases of the recipe in ``path`` do not fit together."""
    with name_file_in_errors(path):
        from vfl_party.phases.course import Course

        Course(recipe).check()


def run_federation(
    tables: Mapping[str, Any],
    recipe: Recipe,
    base: Path,
    folder: Path,
    screen: View,
    launcher: Launcher | None,
    *,
    keep_going: bool = False,
    stop: threading.Event | None = None,
    modules: Sequence[Path] = (),
    on_line: OnLine | None = None,
) -> None:
    """Runs one federation to its end.

    Args:
        tables: the recipe as written.
        recipe: the recipe, parsed.
        base: the folder to which the recipe's paths are relative.
        folder: the folder of the run, with the run's name; it must not exist yet.
        stop: an event with which another thread can end the federation.
        modules: more folders from which the parties import modules.
        on_line: called with a party's name and each line of its ``metrics.jsonl``, soon after it
            is written, and again for a round that is repeated after an interruption. Its exceptions
            end the federation.

    Raises InputError and ProcessFailed.
    """
    data = divide(recipe, base)
    federation = Federation(recipe, folder.parent, folder / "federation", data, base)
    federation.write(tables)
    Origin(base, data).note(folder)
    Simulation(
        federation, folder, screen, keep_going, launcher, stop, modules=modules, on_line=on_line
    ).run()


@dataclass
class Simulation:
    """The processes of one run."""

    federation: Federation
    folder: Path
    screen: View
    keep_going: bool = False
    # Without a launcher, each process is started with a new interpreter.
    launcher: Launcher | None = None
    stop: threading.Event | None = None
    modules: Sequence[Path] = ()
    on_line: OnLine | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    _histories: dict[str, History] = field(default_factory=dict)
    _events: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    _started: bool = False
    _restarts: dict[str, int] = field(default_factory=dict)
    # The failed processes, in the order in which the failures were noticed.
    _failed: list[Process] = field(default_factory=list)

    def run(self) -> None:
        """Starts all processes and returns when all have succeeded. On an error, it ends all of
        them.
        """
        try:
            self._start_server()
            self._wait_for_all()
        finally:
            end_all(list(self.processes.values()))
            self._show_notes()
        # The server may have written its last events in the meantime.
        self._show(0.0)

    def _start_server(self) -> None:
        recipe, federation = self.federation.recipe, self.federation
        args = [
            "vfl-server",
            "run",
            str(federation.recipe_path),
            "--listen",
            "127.0.0.1:0",
            "--fresh",
        ]
        args += ["--rows-at-most", str(MAX_ROWS)]
        args += ["--ca", str(federation.folder / "certs" / "ca.pem")]
        args += ["--out", str(federation.out), "--run-id", self.folder.name]
        self.processes[recipe.server] = Process(
            recipe.server,
            args,
            self.folder / recipe.server,
            threads=1,
            events=self._events,
            launcher=self.launcher,
        )

    def _start_party(self, name: str, *options: str) -> None:
        threads = get_simulate_settings(self.federation.recipe).threads
        args = ["vfl-party", "run", str(self.federation.party_path(name)), *options]
        self.processes[name] = Process(
            name,
            args,
            self.folder / name,
            threads=threads,
            modules=[self.federation.base, *self.modules],
            launcher=self.launcher,
        )

    def _wait_for_all(self) -> None:
        server = self.federation.recipe.server
        server_ended_s: float | None = None
        while any(process.status is None for process in self.processes.values()):
            self._show(_TICK_S)
            self._pass_lines()
            if self.stop is not None and self.stop.is_set():
                raise ProcessFailed(self.folder.name, "stopped", 130)
            if self._update_failures():
                self._wait_for_failures()
                raise self._make_failure()
            if self.processes[server].status == 0:
                server_ended_s = server_ended_s or time.monotonic()
                if time.monotonic() - server_ended_s > _LINGER_S:
                    late = next(
                        name for name, process in self.processes.items() if process.status is None
                    )
                    raise ProcessFailed(
                        late, f"did not end within {_LINGER_S:g} s of the server", 3
                    )
        self._pass_lines()
        if self._update_failures():
            raise self._make_failure()

    def _pass_lines(self) -> None:
        """Passes new lines of the parties' metrics to ``on_line``."""
        if self.on_line is None:
            return
        for party in self.federation.recipe.parties:
            history = self._histories.setdefault(
                party.name, History(PartyFolder(self.folder / party.name))
            )
            if history.source.has_rounds:
                for line in history.update():
                    self.on_line(party.name, line)

    def _make_failure(self) -> ProcessFailed:
        """Returns the error to raise. Its text does not contain the path of the recipe's copy."""
        failed = find_culprit(self._failed)
        sentence = failed.sentence().replace(
            f"{self.federation.recipe_path.resolve()}: ", "recipe: "
        )
        return ProcessFailed(failed.name, sentence, failed.failure().exit_code)

    def _show(self, timeout_s: float) -> None:
        """Shows the server's events, and waits at most ``timeout_s`` for the first event."""
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            self.screen.tick()

    def _show_notes(self) -> None:
        """Shows the parties' notes on their own tables, from the files of their standard output."""
        for party in self.federation.recipe.parties:
            path = self.folder / party.name / "stdout"
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            # A restarted party repeats its notes, so duplicates are removed.
            for event in parse_events(dict.fromkeys(lines)):
                if event["event"] in NOTE_EVENTS:
                    self.screen.show(make_note_event(party.name, event["event"], event))

    def _handle(self, event: dict[str, Any]) -> None:
        self.screen.show(event)
        if event["event"] == "ready" and len(self.processes) == 1:
            for party in self.federation.recipe.parties:
                self.federation.write_party(party.name, event["address"])
                self._start_party(party.name, "--fresh")
        self._started = self._started or event["event"] == "started"

    def _update_failures(self) -> list[Process]:
        """Returns the processes that have failed so far. Restarts killed parties if ``keep_going``
        is set.
        """
        for name, process in list(self.processes.items()):
            status = process.status
            if status in (None, 0) or process in self._failed:
                continue
            restarts = self._restarts.get(name, 0)
            is_party = name != self.federation.recipe.server
            if self.keep_going and is_party and (status or 0) < 0 and restarts < _MAX_RESTARTS:
                self._restarts[name] = restarts + 1
                process.wait()
                self.screen.show({"event": "restarted", "party": name, "how": process.sentence()})
                # Without --fresh, the party continues from its checkpoints.
                self._start_party(name)
                continue
            self._failed.append(process)
        return self._failed

    def _wait_for_failures(self) -> None:
        """Gives the other processes time to end by themselves, because their error may be the cause
        of the failure.
        """
        is_noticed = self._started and all((process.status or 0) > 0 for process in self._failed)
        give_up_s = time.monotonic() + (_GRACE_S if is_noticed else _SHORT_GRACE_S)
        while time.monotonic() < give_up_s and any(
            process.status is None for process in self.processes.values()
        ):
            self._show(_TICK_S)
            self._update_failures()


def new_run_id(name: str, baseline: str | None = None) -> str:
    """Returns a new run id, ``YYYYmmdd-HHMMSS-<recipe>-xxxx``, with the time in UTC. The name of a
    baseline follows the recipe's name.
    """
    name = name if baseline is None else f"{name}-{baseline}"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}-{os.urandom(2).hex()}"
