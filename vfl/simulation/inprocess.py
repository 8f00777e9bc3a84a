"""Runs a whole federation in this process. The parties take turns and exchange messages in memory.

The results are the same as with separate processes, bit for bit. One party computes at a time, and
torch's state is saved and restored for each party (``vfl_party.base.turns``). No party can be late
or lost. An error of one party ends the run for all parties, and is raised with its traceback.
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

from vfl_common.bundle import PROTOCOL, Hub, Ledger, Link
from vfl_common.config.data import DataSettings, without_features
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import SimulateSettings
from vfl_common.errors import Code, InputError, InterruptedRun, VflError
from vfl_common.process import program
from vfl_common.process.logs import NOTE_EVENTS, Console, make_note_event
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
# A number of rounds that no run reaches, which disables checkpoints between phases.
_NEVER = 10**9

# Only one run at a time may use this process, because its runs share torch's random generators and
# number of threads.
_RUNNING = threading.RLock()
# The number of active runs in the thread that holds the lock.
_runs = 0


class PartyConsole(Console):
    """Forwards only a party's notes about its own table, because the server's events report the
    rest.
    """

    def __init__(self, name: str, tell: Callable[[Event], None]) -> None:
        super().__init__("vfl", json_lines=False)
        self._name, self._call_observer = name, tell

    def emit(self, event: str, **facts: Any) -> None:
        """Shows an event."""
        self.show(event, **facts)

    def show(self, event: str, **facts: Any) -> None:
        """Forwards an event about the party's table. Other events are ignored."""
        if event in NOTE_EVENTS:
            self._call_observer(make_note_event(self._name, event, facts))


@dataclass
class MemoryTransport:
    """The in-memory connections of one party; see ``vfl_party.runtime.generation.Transport``."""

    hub: Hub | None
    link: Link | None
    server: Link | None
    ends: list[ExchangeHub[MemoryPipe] | MemoryLink] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    # Messages do not leave the process, so they are not recorded.
    record: None = None

    def confer(self, *, once: bool = False) -> None:
        """Does nothing, because there are no remote peers to confer with."""
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
    """Runs a federation to its end, and returns its summary. A process makes one run at a time, so
    a second thread waits.

    Args:
        recipe: the recipe.
        data: {party: its data settings}.
        folder: the folder of the run, with the run's name; it must not exist yet. The parties'
            folders are made in it.
        load: reads a party's table; by default from the files that ``data`` names.
        modules: a folder with the user's own modules.
        show: called with the server's events, to show progress.
        observe: called after each round of each party with the party's name, the phase, the number
            of finished rounds, the number of all rounds, the metrics, and a function that copies
            the party's current models.
        attach: called with each assembled party before it runs. A rehearsal of attacks uses it to
            observe the party.
        secrets: {party: the 32-byte seed of its weights, dropout, orders and views}; by default the
            recipe's seed is used.

    Raises VflError; other exceptions of a party are raised unchanged.
    """
    with program.pause_gc():
        from vfl_party.assembly import party as assembly
        from vfl_party.assembly.models import encoder_settings
        from vfl_party.runtime.joining import prepare_training

    def open_party(name: str) -> OpenedParty:
        settings = recipe.party(name)
        party_data = (
            data[name]
            if settings is not None and settings.features
            else without_features(data[name])
        )
        encoder = encoder_settings(recipe, name, None)
        work = prepare_training(recipe, name, folder.parent)
        return assembly.open_party(recipe, name, party_data, encoder, load or assembly.load, work)

    with _open_federation(recipe, "train", folder, modules, show, observe) as federation:
        federation.attach, federation.secrets = attach, secrets
        return federation.run(open_party, {"job": "train"})


def predict_solo(
    run: Path,
    data: Mapping[str, DataSettings],
    outputs: Sequence[Output],
    load: Load,
    modules: Path,
) -> tuple[Predicted, str, list[str]]:
    """Predicts rows of the active party with the student of a finished run.

    ``data``: {active party: its data settings with the new rows as source}. The other arguments and
    the result are those of ``predict_in_process``. Raises VflError.
    """
    from vfl_party.assembly.trial import modules_of
    from vfl_party.base.devices import resolve_device
    from vfl_party.base.turns import isolate_torch as torch_alone
    from vfl_party.predict.prediction import Alone
    from vfl_party.predict.run import load_solo, prediction_data, unseen

    ((name, settings),) = data.items()
    for output in outputs:
        output.check(settings)
    trained = load_solo(run, name)
    device = resolve_device("cpu")
    with _lock_process(), modules_of(modules), torch_alone(1, [device]):
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
    """Predicts new rows with the models of a finished run.

    Returns the number of predicted rows of the active party, the meaning of the scores, and notes
    on columns with categories that training did not have.

    Args:
        run: the folder of the run, with the folders of all parties.
        data: {party: its data settings of training, with the new rows as source}.
        outputs: the files to which the active party writes the result.
        folder: a new folder for the prediction; it must not exist yet.
        load, modules: as in ``run_in_process``.
        without: the passive parties that do not take part, and are not in ``data``.
    Raises VflError.
    """
    with program.pause_gc():
        from vfl_party.assembly import party as assembly
        from vfl_party.data import Labels
        from vfl_party.predict.prediction import Prediction
        from vfl_party.predict.results import id_names, label_name, meaning
        from vfl_party.predict.run import load_joint, prediction_data, unseen
        from vfl_party.runtime import versions

    trained = {name: load_joint(run, name, without) for name in data}
    run_ids = {
        name: RunFolder(party.path, party.run_id).facts().get("run_id")
        for name, party in trained.items()
    }
    first_party = next(iter(run_ids))
    different_party = next(
        (name for name in run_ids if run_ids[name] != run_ids[first_party]), None
    )
    if different_party is not None:
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{run}: the folders of {first_party} and {different_party} are of different runs "
            f"({run_ids[first_party]} and {run_ids[different_party]}). Restore the right one.",
        )
    recipe = trained[first_party].recipe
    active = recipe.active.name
    for output in outputs:
        output.check(data[active])
    tables: dict[str, Table] = {}
    works: dict[str, Prediction] = {}
    notes: list[str] = []

    def open_party(name: str) -> OpenedParty:
        settings = recipe.party(name)
        assert settings is not None  # noqa: S101 - its folder is in the run's
        party_data = prediction_data(data[name], None, trained[name].state)
        party = trained[name]
        work = Prediction(
            party,
            settings,
            id_names(party_data),
            outputs,
            says_parties=party.says_parties,
            expects=party.expects,
        )
        opened = assembly.open_party(
            recipe, name, party_data, trained[name].encoder, load or assembly.load, work
        )
        versions.require_same(
            trained[name].path, trained[name].plugins, versions.get_model_versions(opened)
        )
        tables[name], works[name] = opened.table, work
        notes.extend(
            f"{name}: {text}" for text in unseen(trained[name], opened.table) if settings.features
        )
        return opened

    with _open_federation(
        recipe, "predict", folder, modules, lambda _event: None, None
    ) as federation:
        summary = federation.run(open_party, {"job": "predict", "trained_run": run.name})
    table = tables[active]
    report = next(party for party in summary.parties if party.name == active)
    predicted = works[active].count_rows(table, report.common_rows if report.rows else len(table))
    notes.extend(dict.fromkeys(works[active].said))
    return (
        predicted,
        meaning(Labels.from_state(trained[active].state["labels"]), label_name(data[active])),
        notes,
    )


@contextlib.contextmanager
def _open_federation(
    recipe: Recipe,
    job: Job,
    folder: Path,
    modules: Path | None,
    show: Callable[[Event], None],
    observe: Observe | None,
) -> Iterator[_Federation]:
    """Yields a federation that may use torch in the ``with`` block. A second run waits."""
    from vfl_party.assembly.trial import modules_of
    from vfl_party.base.devices import resolve_device
    from vfl_party.base.turns import isolate_torch

    simulate = recipe.simulate if recipe.simulate is not None else SimulateSettings()
    devices = {
        party.name: resolve_device(simulate.devices.get(party.name, "cpu"))
        for party in recipe.parties
    }
    own = contextlib.nullcontext() if modules is None else modules_of(modules)
    with _lock_process(), own, isolate_torch(simulate.threads, list(devices.values())) as turns:
        yield _Federation(recipe, job, folder, turns, devices, show, observe)


@contextlib.contextmanager
def _lock_process() -> Iterator[None]:
    """Waits until no other thread makes a run. Raises InputError if this thread already makes a
    run, because it would wait forever.
    """
    global _runs
    with _RUNNING:
        if _runs:
            raise InputError(
                Code.CONFIG_INVALID,
                "another run is active in this thread. Start the new run after it, or with "
                "processes=True.",
            )
        _runs += 1
        try:
            with program.reduce_gc_in_block():
                yield
        finally:
            _runs -= 1


def _show_without_waiting(show: Callable[[Event], None], event: str, **facts: Any) -> None:
    """Shows the server's events, except ``waiting``, because all parties join at once."""
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

        # The parties compute one after the other, so a step takes longer than with processes.
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
            partial(_show_without_waiting, show),
            partial(turns.join, helps=True),
        )

    def run(self, open_party: Callable[[str], OpenedParty], facts: Mapping[str, str]) -> Summary:
        """Runs all parties to the end. ``open_party``: opens a party's data. ``facts``: values to
        record in each party's folder.
        """
        server = self._server
        # All parties are made before any of them runs, because they share torch's generators.
        runs = {name: self._make_run(name, open_party(name), facts) for name in self._ledgers}
        for name, run in runs.items():
            self._turns.join(name, partial(self._run_party, name, run))
        try:
            self._turns.play()
        except BaseException as error:  # noqa: BLE001 - raised below, after it is reported to the parties
            server.fail(server.recipe.server, error)
            self._turns.play()
        finally:
            server.close()
        if server.failure is not None:
            raise server.failure
        assert server.summary is not None  # noqa: S101 - all parties have reported
        server.folder.prepare_finished_note()()
        return server.summary

    def _make_run(self, name: str, opened: OpenedParty, facts: Mapping[str, str]) -> PartyRun:
        """Makes a party that is ready to join the run."""
        from vfl_party.align import AlignedRows
        from vfl_party.assembly.party import assemble
        from vfl_party.outbound.policies import load_trial_policy
        from vfl_party.policy.guards import guards_of_trial, trees_of_trial
        from vfl_party.runtime import versions
        from vfl_party.runtime.folders import Folders
        from vfl_party.runtime.generation import Preparation, Processes
        from vfl_party.runtime.progress import Progress
        from vfl_party.runtime.run import PartyRun

        # This policy applies to the alignment, as in the party's own program.
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
            # A party may be made again, and then replaces the earlier party.
            self._assembled[name] = assembled
            if self.attach is not None:
                self.attach(name, assembled)
            return assembled

        prepared = Preparation(
            opened,
            Processes(self._devices[name], make),
            plugins,
            policy=policy,
            secret=self.secrets[name] if self.secrets is not None else None,
            guards=guards_of_trial(recipe, name),
        )
        folders = Folders(
            self._folder.parent,
            name,
            recipe,
            {**facts, "plugins": plugins | versions.get_model_versions(opened)},
            # Runs in this process cannot be resumed, so checkpoints are needed only after phases.
            checkpoint_every=_NEVER,
            logs=False,
        )
        session, console = self._server.session(name, ledger), PartyConsole(name, self._show)
        opened.tell(console.show)
        progress = Progress(console, session, ledger, name == recipe.active.name, Clock(used=None))
        if self._observe is not None:
            progress.watchers.append(partial(self._call_observer, self._observe, name))
        connect = partial(self._connect, name, ledger)
        return PartyRun(prepared, folders, session, connect, progress)

    def _call_observer(self, observe: Observe, name: str, *values: Any) -> None:
        """Calls the observer with copies of the values, so that it may keep and change them."""
        phase, round_, rounds, metrics = copy.deepcopy(values)
        models = partial(self._copy_models, name)
        self._turns.run_isolated(partial(observe, name, phase, round_, rounds, metrics, models))

    def _copy_models(self, name: str) -> TrainedParty:
        """Returns copies of a party's current models. Raises InputError if this is impossible."""
        from vfl_party.predict.trained import of_state

        party = self._assembled[name]
        encoder, state = party.opened.encoder, party.state()
        return of_state(self._folder.name, name, self._recipe, encoder, state)

    def _run_party(self, name: str, run: PartyRun) -> None:
        try:
            _, folder = run.run()
            folder.prepare_finished_note()()
        except BaseException as error:  # noqa: BLE001 - raised by ``run``
            self._server.fail(name, error)

    def _connect(self, name: str, ledger: Ledger, start: Start, clock: Clock) -> MemoryTransport:
        _ = start
        exchange = self._exchange
        server = MemoryLink(self._weights.pipe, name, timeout_s=math.inf, ledger=ledger)
        if name == exchange.pipe.name:
            return MemoryTransport(exchange, None, server, [exchange, server], clock)
        link = MemoryLink(exchange.pipe, name, timeout_s=self._timeout_s, ledger=ledger)
        return MemoryTransport(None, link, server, [link, server], clock)
