"""Runs a whole federation in this process: each party a thread, with the exchange in memory.

What comes of it is what separate processes compute, bit for bit: one party computes at a time, with torch's generators
in the state in which it left them (``vfl_party.draws``). Nobody is ever late or lost: an error of one party ends the
run for all, and is raised here, with its own traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_common.config.data import DataSettings, ids_only
from vfl_common.config.division import settings_of
from vfl_common.config.recipe import Recipe
from vfl_common.errors import AbortedError, InterruptedRun, VflError
from vfl_common.ledger import Ledger
from vfl_common.link import Hub, Link
from vfl_common.logs import Console
from vfl_common.rpc.memory import MemoryHub, MemoryLink
from vfl_common.run_folder import RunFolder, create
from vfl_common.summary import Summary
from vfl_server.local import LocalServer

if TYPE_CHECKING:
    import torch

    from vfl_party.draws import OwnDraws
    from vfl_party.part import Part
    from vfl_party.party import Load

Event = dict[str, Any]
Observe = Callable[[str, str, int, int, dict[str, dict[str, float]]], None]
_NEVER = 10**9  # rounds
_END_S = 10.0  # for all parties to notice that the run has ended
_WATCH_S = 0.2

_RUNNING = threading.Lock()  # torch's generators and its number of threads belong to the whole process


class Quiet(Console):
    """Shows nothing: the server's events tell how the run goes."""

    def __init__(self) -> None:
        super().__init__("vfl", json_lines=False)

    def emit(self, event: str, **facts: Any) -> None:
        """Drops the event."""

    def show(self, event: str, **facts: Any) -> None:
        """Drops the event."""


@dataclass
class MemoryTransport:
    """One party's exchange in memory; see ``vfl_party.job.Transport``."""

    hub: Hub | None
    link: Link | None
    server: Link | None
    ends: list[MemoryHub | MemoryLink] = field(default_factory=list)

    def end(self, error: VflError) -> None:
        for each in self.ends:
            each.end(error)

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            self.end(error if isinstance(error, VflError) else InterruptedRun(str(error)))


def run_in_threads(
    recipe: Recipe,
    data: Mapping[str, DataSettings],
    folder: Path,
    *,
    load: Load | None = None,
    show: Callable[[Event], None] = lambda _event: None,
    observe: Observe | None = None,
) -> Summary:
    """Runs a federation to its end; returns its summary. One run at a time in a process: another one waits.

    Args:
        data: {party: its data}.
        folder: of the run, named after it; it must not exist yet. The parties' folders are in it, as with processes.
        load: reads a party's table; None: from the files that ``data`` names.
        show: called with the events of the server, as ``vfl simulate`` shows them.
        observe: called after each round of each party with its name, phase, rounds done, rounds and metrics.

    Raises VflError; whatever else a party raises is raised as it is.
    """
    from vfl_party.devices import resolve_device
    from vfl_party.draws import alone

    simulate = settings_of(recipe)
    devices = {party.name: resolve_device(simulate.devices.get(party.name, "cpu")) for party in recipe.parties}
    with _RUNNING, alone(simulate.threads, list(devices.values())) as turns:
        return _Federation(recipe, folder, turns, devices, show, observe).run(data, load)


@dataclass
class _Federation:
    recipe: Recipe
    folder: Path
    turns: OwnDraws
    devices: Mapping[str, torch.device]
    show: Callable[[Event], None]
    observe: Observe | None
    exchange: MemoryHub | None = None
    weights: MemoryHub | None = None

    def run(self, data: Mapping[str, DataSettings], load: Load | None) -> Summary:
        recipe = self.recipe
        ledgers = {party.name: Ledger() for party in recipe.parties}
        opened = create(self.folder.parent, self.folder.name, recipe.server, recipe)
        opened.note(job="train")
        patience_s = recipe.run.step_timeout_s * (1 + len(recipe.parties))  # they compute one after the other
        self.exchange = MemoryHub(
            recipe.active.name,
            [party.name for party in recipe.passives],
            timeout_s=patience_s,
            ledger=ledgers[recipe.active.name],
            turns=self.turns,
            punctual=True,
        )
        names = [party.name for party in recipe.parties]
        self.weights = MemoryHub(recipe.server, names, timeout_s=float("inf"), turns=self.turns, punctual=True)
        server = LocalServer(recipe, "train", opened, self.weights, self.turns, self._emit)
        # All parties are made before any of them runs: they share torch's generators.
        parts = {name: self._part(name, data[name], ledgers[name], server, load) for name in names}
        threads = [
            threading.Thread(target=self._take_part, args=[name, part, server], name=name, daemon=True)
            for name, part in parts.items()
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_WATCH_S)
        except BaseException as error:  # somebody stops it: the parties notice at their next step
            server.fail(recipe.server, AbortedError("the run was stopped", party=recipe.server))
            for thread in threads:
                thread.join(_END_S)
            raise error
        finally:
            server.close()
        if server.failure is not None:
            raise server.failure
        assert server.summary is not None  # noqa: S101 - all parties have reported
        server.folder.finishing()()
        return server.summary

    def _part(
        self, name: str, data: DataSettings, ledger: Ledger, server: LocalServer, load: Load | None
    ) -> Callable[[], None]:
        """Makes a party, as before joining. Returns what runs it."""
        from vfl_party import party as assembly
        from vfl_party.align import Aligned, alignment_of
        from vfl_party.checkpoint import CheckpointStore
        from vfl_party.job import Jobs
        from vfl_party.part import Part, training
        from vfl_party.policies.allow_all import AllowAll
        from vfl_party.progress import Progress

        recipe, out = self.recipe, self.folder.parent
        settings = recipe.party(name)
        assert settings is not None  # noqa: S101 - a name of the roster
        own = data if settings.features else ids_only(data)
        encoder = assembly.encoder_settings(recipe, name, None)
        opened = assembly.open_party(recipe, name, own, encoder, load or assembly.load)
        work = training(recipe, name, out)

        def make(aligned: Aligned) -> assembly.Assembled:
            return assembly.assemble(opened, aligned, work, device=self.devices[name])

        def open_folder(run_id: str) -> RunFolder:
            folder = create(out, run_id, name, recipe)
            folder.note(job="train")
            folder.checkpoints = CheckpointStore(folder.path / "checkpoints", recipe.run.kept_checkpoints)
            return folder

        jobs = Jobs(opened, alignment_of(recipe, AllowAll()), make)
        session, console = server.session(name, ledger), Quiet()
        progress = Progress(console, session, ledger, settings.role == "active")
        if self.observe is not None:
            progress.watchers.append(partial(self.observe, name))
        part = Part(
            recipe,
            name,
            "train",
            session,
            jobs,
            progress,
            console,
            self.devices[name],
            transport=lambda _start: self._transport(name, ledger),
            open_folder=open_folder,
            plan=jobs.expected.plan if jobs.expected is not None else (),
            checkpoint_every=_NEVER,  # but at the end of each phase: nothing here can be resumed
        )
        return partial(self._run_part, part)

    def _run_part(self, part: Part) -> None:
        _, folder = part.run()
        folder.finishing()()

    def _take_part(self, name: str, run: Callable[[], None], server: LocalServer) -> None:
        with self.turns.turn():
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - raised where the run was asked for
                server.fail(name, error)

    def _transport(self, name: str, ledger: Ledger) -> MemoryTransport:
        assert self.exchange is not None  # noqa: S101 - made before the parties
        assert self.weights is not None  # noqa: S101
        server = MemoryLink(self.weights, name, timeout_s=float("inf"), ledger=ledger)
        if name == self.recipe.active.name:
            return MemoryTransport(self.exchange, None, server, [self.exchange, server])
        link = MemoryLink(self.exchange, name, timeout_s=self.exchange.timeout_s, ledger=ledger)
        return MemoryTransport(None, link, server, [link, server])

    def _emit(self, event: str, **facts: Any) -> None:
        self.show({"event": event, **facts})
