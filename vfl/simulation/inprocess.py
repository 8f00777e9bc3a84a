"""Runs a whole federation in this process: the parties take turns, with the exchange in memory.

The results equal those of separate processes, bit for bit: one party computes at a time, with
torch's state as it left it (``vfl_party.base.turns``). No party is ever late or lost: an error of
one party ends the run for all, and is raised here, with its own traceback.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_common.config.data import DataSettings, ids_only
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import SimulateSettings
from vfl_common.errors import Code, InputError, InterruptedRun, VflError
from vfl_common.ledger import Ledger
from vfl_common.link import PROTOCOL, Hub, Link
from vfl_common.process import garbage
from vfl_common.process.logs import NOTE_EVENTS, Console, note_event
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryLink, MemoryPipe
from vfl_common.run_folder import RunFolder, create
from vfl_common.summary import Summary
from vfl_party.base.step_timing import Clock
from vfl_server.in_process import LocalServer

if TYPE_CHECKING:
    import torch

    from vfl_common.rpc.messages import Start
    from vfl_common.stages import Job
    from vfl_party.assembly.party import Assembled, Load, OpenedParty
    from vfl_party.base.turns import TakingTurns
    from vfl_party.data import Table
    from vfl_party.predict.results import Output, Predicted
    from vfl_party.predict.trained import TrainedParty
    from vfl_party.runtime.run import PartyRun

Event = dict[str, Any]
Observe = Callable[
    [str, str, int, int, dict[str, dict[str, float]], Callable[[], "TrainedParty"]], None
]
Attach = Callable[[str, "Assembled"], None]
# A number of rounds that no run reaches.
_NEVER = 10**9

# Torch's generators and its number of threads belong to the whole process.
_RUNNING = threading.RLock()
# The number of runs in the thread that has the lock.
_runs = 0


class PartyConsole(Console):
    """Passes on a party's notes on its own table; the server's events report all else."""

    def __init__(self, name: str, tell: Callable[[Event], None]) -> None:
        super().__init__("vfl", json_lines=False)
        self._name, self._tell = name, tell

    def emit(self, event: str, **facts: Any) -> None:
        """Shows an event."""
        self.show(event, **facts)

    def show(self, event: str, **facts: Any) -> None:
        """Passes on an event about the party's table."""
        if event in NOTE_EVENTS:
            self._tell(note_event(self._name, event, facts))


@dataclass
class MemoryTransport:
    """One party's exchange in memory; see ``vfl_party.runtime.generation.Transport``."""

    hub: Hub | None
    link: Link | None
    server: Link | None
    ends: list[ExchangeHub[MemoryPipe] | MemoryLink] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    # Nothing leaves the process, so nothing is recorded.
    record: None = None

    def confer(self, *, once: bool = False) -> None:
        """Does nothing: there are no peers to confer with."""
        _ = once

    def end(self, error: VflError) -> None:
        """Ends all exchanges with an error."""
        for exchange in self.ends:
            exchange.end(error)

    def close(self, error: BaseException | None) -> None:
        """Closes the transport, with an error if the party failed."""
        if error is not None:
            self.end(error if isinstance(error, VflError) else InterruptedRun(str(error)))


def run_in_process(
    recipe: Recipe,
    data: Mapping[str, DataSettings],
    folder: Path,
    *,
    load: Load | None = None,
    modules: Path | None = None,
    show: Callable[[Event], None] = lambda _event: None,
    observe: Observe | None = None,
    attach: Attach | None = None,
    secrets: Mapping[str, bytes] | None = None,
) -> Summary:
    """Runs a federation to its end, and returns its summary. One run at a time in a process:
    another one waits.

    Args:
        data: {party: its data}.
        folder: the run's, named after it; it must not exist yet. The parties' folders are in it, as
            with processes.
        load: reads a party's table; None: from the files that ``data`` names.
        modules: a folder with the user's own modules.
        show: called with the events of the server, as ``vfl simulate`` shows them.
        observe: called after each round of each party with its name, phase, rounds done, rounds,
            metrics, and a function that copies its current models.
        attach: called with each assembled party, before it runs; a rehearsal of attacks listens
            there.
        secrets: {party: the 32-byte seed of its own weights, dropout, orders and views}; None: the
            recipe's seed.

    Raises VflError; other exceptions of a party are raised unchanged.
    """
    with garbage.gc_paused():
        from vfl_party.assembly import party as assembly
        from vfl_party.assembly.models import encoder_settings
        from vfl_party.runtime.joining import training

    def cast(name: str) -> OpenedParty:
        settings = recipe.party(name)
        own = data[name] if settings is not None and settings.features else ids_only(data[name])
        encoder = encoder_settings(recipe, name, None)
        work = training(recipe, name, folder.parent)
        return assembly.open_party(recipe, name, own, encoder, load or assembly.load, work)

    with _federation(recipe, "train", folder, modules, show, observe) as federation:
        federation.attach, federation.secrets = attach, secrets
        return federation.run(cast, {"job": "train"})


def predict_solo(
    run: Path,
    data: Mapping[str, DataSettings],
    outputs: Sequence[Output],
    load: Load,
    modules: Path,
) -> tuple[Predicted, str, list[str]]:
    """Predicts rows of the active party with the student of a finished run, as
    ``predict_in_process``; ``data``: {the active party: the data of training, with these rows}.

    Raises VflError.
    """
    from vfl_party.assembly.trial import modules_of
    from vfl_party.base.devices import resolve_device
    from vfl_party.base.turns import isolate_torch as torch_alone
    from vfl_party.predict.alone import Alone, load_solo
    from vfl_party.predict.prediction import prediction_data, unseen

    ((name, settings),) = data.items()
    for output in outputs:
        output.check(settings)
    trained = load_solo(run, name)
    device = resolve_device("cpu")
    with _one_at_a_time(), modules_of(modules), torch_alone(1, [device]):
        rows = prediction_data(settings, None, trained.state)
        alone = Alone.open_for(trained, name, rows, load)
        notes = [f"{name}: {text}" for text in unseen(trained, alone.opened.table)]
        predicted = alone.write(outputs, device)
    return predicted, alone.meaning(settings), notes


def predict_in_process(
    run: Path,
    data: Mapping[str, DataSettings],
    outputs: Sequence[Output],
    folder: Path,
    *,
    load: Load | None = None,
    modules: Path | None = None,
    without: Collection[str] = (),
) -> tuple[Predicted, str, list[str]]:
    """Predicts new rows with the models of a finished run, which has all parties' folders in
    ``run``.

    Returns the number of predicted rows of the active party, the meaning of the result's numbers,
    and notes on columns with categories that training did not have.

    Args:
        data: {party: the data of training, with the new rows as source}.
        outputs: where the active party writes the result.
        folder: the prediction's own; it must not exist yet.
        load, modules: as in ``run_in_process``.
        without: passive parties that take no part, which are not in ``data``.

    Raises VflError.
    """
    with garbage.gc_paused():
        from vfl_party.assembly import party as assembly
        from vfl_party.data import Labels
        from vfl_party.predict.prediction import Prediction, load_joint, prediction_data, unseen
        from vfl_party.predict.results import id_names, label_name, meaning
        from vfl_party.runtime import versions

    trained = {name: load_joint(run, name, without) for name in data}
    run_ids = {
        name: RunFolder(party.path, party.run_id).facts().get("run_id")
        for name, party in trained.items()
    }
    one = next(iter(run_ids))
    other = next((name for name in run_ids if run_ids[name] != run_ids[one]), None)
    if other is not None:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{run}: the folders of {one} and {other} are of different runs ({run_ids[one]} and "
            f"{run_ids[other]}). Restore the right one.",
        )
    recipe = trained[one].recipe
    active = recipe.active.name
    for output in outputs:
        output.check(data[active])
    tables: dict[str, Table] = {}
    works: dict[str, Prediction] = {}
    new: list[str] = []

    def cast(name: str) -> OpenedParty:
        settings = recipe.party(name)
        assert settings is not None  # noqa: S101 - its folder is in the run's
        own = prediction_data(data[name], None, trained[name].state)
        party = trained[name]
        work = Prediction(
            party,
            settings,
            id_names(own),
            outputs,
            says_parties=party.says_parties,
            expects=party.expects,
        )
        opened = assembly.open_party(
            recipe, name, own, trained[name].encoder, load or assembly.load, work
        )
        versions.require_same(trained[name].path, trained[name].plugins, versions.modelling(opened))
        tables[name], works[name] = opened.table, work
        new.extend(
            f"{name}: {text}" for text in unseen(trained[name], opened.table) if settings.features
        )
        return opened

    with _federation(recipe, "predict", folder, modules, lambda _event: None, None) as federation:
        summary = federation.run(cast, {"job": "predict", "trained_run": run.name})
    table = tables[active]
    report = next(party for party in summary.parties if party.name == active)
    predicted = works[active].count_rows(table, report.common_rows if report.rows else len(table))
    new.extend(dict.fromkeys(works[active].said))
    return (
        predicted,
        meaning(Labels.from_state(trained[active].state["labels"]), label_name(data[active])),
        new,
    )


@contextlib.contextmanager
def _federation(
    recipe: Recipe,
    job: Job,
    folder: Path,
    modules: Path | None,
    show: Callable[[Event], None],
    observe: Observe | None,
) -> Iterator[_Federation]:
    """Gives torch to the block; another run waits."""
    from vfl_party.assembly.trial import modules_of
    from vfl_party.base.devices import resolve_device
    from vfl_party.base.turns import isolate_torch

    simulate = recipe.simulate if recipe.simulate is not None else SimulateSettings()
    devices = {
        party.name: resolve_device(simulate.devices.get(party.name, "cpu"))
        for party in recipe.parties
    }
    own = contextlib.nullcontext() if modules is None else modules_of(modules)
    with _one_at_a_time(), own, isolate_torch(simulate.threads, list(devices.values())) as turns:
        yield _Federation(recipe, job, folder, turns, devices, show, observe)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Waits for a run of another thread. Raises InputError if this thread is in one, which could
    never end.
    """
    global _runs
    with _RUNNING:
        if _runs:
            raise InputError(
                Code.CONFIG_INVALID,
                "another run is under way in this thread. Start the new one after it, or with "
                "processes=True.",
            )
        _runs += 1
        try:
            with garbage.gc_reduced():
                yield
        finally:
            _runs -= 1


def _but_waiting(show: Callable[[Event], None], event: str, **facts: Any) -> None:
    """Shows the server's events, except the wait for parties, which all join at once."""
    if event != "waiting":
        show({"event": event, **facts})


class _Federation:
    """The server and all parties of one run."""

    def __init__(
        self,
        recipe: Recipe,
        job: Job,
        folder: Path,
        turns: TakingTurns,
        devices: Mapping[str, torch.device],
        show: Callable[[Event], None],
        observe: Observe | None,
    ) -> None:
        self._recipe, self._job, self._folder = recipe, job, folder
        self._turns, self._devices, self._observe, self._show = turns, devices, observe, show
        self.attach: Attach | None = None
        self.secrets: Mapping[str, bytes] | None = None
        self._assembled: dict[str, Assembled] = {}
        self._ledgers = {party.name: Ledger() for party in recipe.parties}
        active = recipe.active.name

        from vfl_party.phases.course import Course

        # The parties compute one after the other, so a step takes longer.
        self._timeout_s = recipe.run.step_timeout_s * (1 + len(recipe.parties))
        exchange = MemoryPipe(
            active,
            [party.name for party in recipe.passives],
            ledger=self._ledgers[active],
            turns=turns,
            in_flight=Course(recipe).in_flight,
        )
        weights = MemoryPipe(recipe.server, list(self._ledgers), turns=turns)
        self._exchange = ExchangeHub(exchange, timeout_s=self._timeout_s, punctual=True)
        self._weights = ExchangeHub(weights, timeout_s=math.inf, punctual=True)
        opened = create(folder.parent, folder.name, recipe.server, recipe)
        opened.note(job=job)
        self._server = LocalServer(
            recipe,
            job,
            opened,
            self._weights,
            turns,
            partial(_but_waiting, show),
            partial(turns.join, helps=True),
        )

    def run(self, cast: Callable[[str], OpenedParty], facts: Mapping[str, str]) -> Summary:
        """Runs all parties to the end. ``cast``: opens a party's data; ``facts``: recorded in each
        party's folder.
        """
        server = self._server
        # All parties are made before any of them runs: they share torch's generators.
        parts = {name: self._part(name, cast(name), facts) for name in self._ledgers}
        for name, part in parts.items():
            self._turns.join(name, partial(self._take_part, name, part))
        try:
            self._turns.play()
        except BaseException as error:  # noqa: BLE001 - raised below, after the parties got it
            server.fail(server.recipe.server, error)
            self._turns.play()
        finally:
            server.close()
        if server.failure is not None:
            raise server.failure
        assert server.summary is not None  # noqa: S101 - all parties have reported
        server.folder.prepare_finished_note()()
        return server.summary

    def _part(self, name: str, opened: OpenedParty, facts: Mapping[str, str]) -> PartyRun:
        """Makes a party, up to joining."""
        from vfl_party.align import AlignedRows
        from vfl_party.assembly.party import assemble
        from vfl_party.outbound.policies import load_trial_policy
        from vfl_party.policy.guards import guards_of_trial, trees_of_trial
        from vfl_party.runtime import versions
        from vfl_party.runtime.folders import Folders
        from vfl_party.runtime.generation import Preparation
        from vfl_party.runtime.progress import Progress
        from vfl_party.runtime.run import PartyRun

        # The policy for the alignment, as in the party's own program.
        policy = load_trial_policy(self._recipe, name)
        recipe, ledger, plugins = (
            self._recipe,
            self._ledgers[name],
            versions.get_shared_versions(opened),
        )

        def make(aligned: AlignedRows, secret: int | None) -> Assembled:
            assembled = assemble(
                opened,
                aligned,
                device=self._devices[name],
                policy=load_trial_policy(recipe, name, policy),
                trees=trees_of_trial(recipe, name),
                secret=secret,
            )
            # A party that is made again replaces the earlier one.
            self._assembled[name] = assembled
            if self.attach is not None:
                self.attach(name, assembled)
            return assembled

        prepared = Preparation(
            opened,
            make,
            plugins,
            self._devices[name],
            policy=policy,
            secret=self.secrets[name] if self.secrets is not None else None,
            guards=guards_of_trial(recipe, name),
        )
        folders = Folders(
            self._folder.parent,
            name,
            recipe,
            {**facts, "plugins": plugins | versions.modelling(opened)},
            # Checkpoints only at the end of each phase: nothing here can be resumed.
            checkpoint_every=_NEVER,
            logs=False,
        )
        session, console = self._server.session(name, ledger), PartyConsole(name, self._show)
        opened.tell(console.show)
        progress = Progress(console, session, ledger, name == recipe.active.name, Clock(used=None))
        if self._observe is not None:
            progress.watchers.append(partial(self._tell, self._observe, name))
        connect = partial(self._transport, name, ledger)
        return PartyRun(prepared, folders, session, connect, progress)

    def _tell(self, observe: Observe, name: str, *values: Any) -> None:
        """Calls a watcher with copies, which it may keep and change."""
        phase, round_, rounds, metrics = copy.deepcopy(values)
        models = partial(self._models, name)
        self._turns.aside(partial(observe, name, phase, round_, rounds, metrics, models))

    def _models(self, name: str) -> TrainedParty:
        """Returns copies of a party's current models. Raises InputError."""
        from vfl_party.predict.trained import of_state

        party = self._assembled[name]
        encoder, state = party.opened.encoder, party.state()
        return of_state(self._folder.name, name, self._recipe, encoder, state)

    def _take_part(self, name: str, part: PartyRun) -> None:
        try:
            _, folder = part.run()
            folder.prepare_finished_note()()
        except BaseException as error:  # noqa: BLE001 - raised by ``run``
            self._server.fail(name, error)

    def _transport(self, name: str, ledger: Ledger, start: Start, clock: Clock) -> MemoryTransport:
        _ = start
        exchange = self._exchange
        server = MemoryLink(self._weights.pipe, name, timeout_s=math.inf, ledger=ledger)
        if name == exchange.pipe.name:
            return MemoryTransport(exchange, None, server, [exchange, server], clock)
        link = MemoryLink(exchange.pipe, name, timeout_s=self._timeout_s, ledger=ledger)
        return MemoryTransport(None, link, server, [link, server], clock)
