"""A run goes on while a checkpoint is written, unless somebody is about to rely on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.bundle import Ledger
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InterruptedRun, VflError
from vfl_common.rpc.messages import Joining, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import Planned
from vfl_party.base.phase import Phase, Predictions, RoundReport, Tree
from vfl_party.base.step_timing import Clock
from vfl_party.runtime.folders import Folders
from vfl_party.runtime.generation import Generation, Statement
from vfl_party.runtime.run import PartyRun

Events = list[str]
RECIPE = Recipe.model_validate(cases.recipe(2))


class Store:
    """Notes what is asked of it; ``fails``: the label whose file cannot be written."""

    def __init__(self, events: Events, fails: str = "") -> None:
        self._events, self._fails = events, fails
        self._held: list[str] = []
        self._writing = ""

    def save_later(self, label: str, tree: Tree) -> None:
        self._wait()
        self._events.append(f"begins {label}")
        self._writing = label

    def save(self, label: str, tree: Tree) -> None:
        self.save_later(label, tree)
        self.flush()

    def flush(self) -> None:
        if self._writing:
            self._wait()
            self._events.append("waits")

    def labels(self) -> list[str]:
        self._wait()
        return self._held

    def count_saved(self) -> int:
        return len(self._held)

    def whole(self) -> list[str]:
        return self.labels()

    def load(self, label: str) -> Tree:
        raise AssertionError(label)

    def discard_after(self, label: str) -> None:
        self._wait()

    def _wait(self) -> None:
        label, self._writing = self._writing, ""
        if label and label == self._fails:
            raise InputError(Code.CHECKPOINT_INVALID, f"cannot write {label}")
        self._held += [label] if label else []


class Rounds(Phase):
    def __init__(
        self, events: Events, name: str, reports: Sequence[RoundReport], alone_from: int | None
    ) -> None:
        self.name, self.rounds, self.alone_from = name, len(reports), alone_from
        self._events, self._reports = events, reports

    def run_round(self, round_: int) -> RoundReport:
        self._events.append(f"{self.name} {round_}")
        return self._reports[round_]


class Work(Generation):
    """A generation whose phases are given, and that is connected to nobody."""

    def __init__(self, phases: Sequence[Phase], events: Events) -> None:
        self._phases, self._events = phases, events

    @property
    def phases(self) -> Sequence[Phase]:
        return self._phases

    @property
    def label_noted(self) -> dict[str, str]:
        return {}

    def confer(self) -> None: ...

    @property
    def statement(self) -> Statement:
        return Statement(
            [Planned(each.name, each.rounds, each.alone_from) for each in self._phases]
        )

    def open(self, *, returning: bool) -> None: ...
    def show_rows(self) -> None: ...
    def unhurried(self) -> None: ...
    def settle(self) -> None: ...
    def keep_profile(self, folder: Path) -> None: ...
    def state(self) -> Tree: ...
    def load_state(self, tree: Tree) -> None: ...
    def end(self, error: VflError) -> None: ...

    def keep(self, folder: Path, phase: str, predictions: Predictions) -> None:
        self._events.append(f"keeps {phase}")

    def close(self, error: BaseException | None) -> None:
        self._events.append("closes")


class Prepared:
    """A party that is ready to join."""

    device = torch.device("cpu")
    plan: Sequence[Planned] = ()

    def __init__(self, role: str, phases: Sequence[Phase], events: Events) -> None:
        self._role, self._phases, self._events = role, phases, events

    def joining(self, address: str) -> Joining:
        return Joining(self._role, "{}", "train", 1, "cpu", exchange_address=address)

    def meet(self, _start: Start) -> dict[str, dict[str, Any]]:
        return {}

    def generation(self, *_: Any) -> Generation:
        return Work(self._phases, self._events)


class Quiet:
    """Progress, and its console, that nobody sees."""

    clock = Clock()

    def __init__(self, show: Callable[..., None]) -> None:
        self.console, self.show = self, show

    def begin(self, *_: Any) -> None: ...
    def begin_round(self, *_: Any) -> None: ...
    def observe(self, *_: Any) -> None: ...


class InFolder(Folders):
    """Folders whose checkpoints are in memory."""

    store: Any

    def open(self, run_id: str) -> RunFolder:
        return RunFolder(self.out, run_id, self.store)


class Server:
    """The session: starts every generation from the beginning. ``lost``: a party is lost in this
    round, once.
    """

    meter: Any
    me, server = "p1", "server"
    ledger = Ledger()
    lenient = None

    def __init__(self, events: Events, lost: str = "") -> None:
        self._events, self._lost = events, lost
        self.meter = self
        self.offers: list[tuple[str, ...]] = []

    def join(self, joining: Joining) -> Start:
        self.offers.append(joining.checkpoints)
        return Start("run", len(self.offers), "", "")

    def check(self) -> None:
        if self._lost and self._events[-1] == self._lost:
            self._lost = ""
            raise InterruptedRun("p1 is lost")

    def alone(self) -> None:
        self._events.append("alone")

    def report(self, *_: Any, **__: Any) -> str:
        self._events.append("reports")
        return ""

    def abort(self, error: BaseException) -> None:
        self._events.append("aborts")

    def close(self) -> None: ...
    def watch(self, end: object) -> None: ...
    def plan(self, aggregations: object) -> None: ...

    def counts(self) -> list[Any]:
        return []


def runner(
    folder: Path,
    events: Events,
    phases: Sequence[Phase],
    *,
    role: str = "passive",
    fails: str = "",
    lost: str = "",
    plan: Sequence[Planned] = (),
    resume: RunFolder | None = None,
    show: Callable[..., None] = lambda _event, **_facts: None,
) -> tuple[PartyRun, Server]:
    session, folders = Server(events, lost), InFolder(folder, "p1", RECIPE, {"job": "train"})
    folders.store, folders.resume, folders.logs = Store(events, fails), resume, False
    progress: Any = Quiet(show)
    prepared = Prepared(role, phases, events)
    prepared.plan = plan
    made = PartyRun(
        prepared,  # type: ignore[arg-type]
        folders,
        session,  # type: ignore[arg-type]
        lambda _start, _clock: None,  # type: ignore[arg-type, return-value]
        progress,
    )
    return made, session


def test_it_waits_for_the_disk_at_the_end_of_a_phase_and_when_the_round_says_so(
    tmp_path: Path,
) -> None:
    events: Events = []
    first = Rounds(
        events,
        "a",
        [RoundReport(1), RoundReport(1), RoundReport(1, done=True), RoundReport(1)],
        None,
    )
    second = Rounds(
        events, "b", [RoundReport(1), RoundReport(1, checkpoint=True), RoundReport(1)], None
    )
    runner(tmp_path, events, [first, second])[0].run()
    assert events == [
        *("a 0", "begins 000001.a.1"),
        *("a 1", "begins 000002.a.2"),
        *("a 2", "begins 000004.a.3", "waits"),
        *("b 0", "begins 000005.b.1"),
        *("b 1", "begins 000006.b.2", "waits"),
        *("b 2", "begins 000007.b.3", "waits"),
        *("closes", "reports"),
    ]


def test_predictions_are_kept_before_a_checkpoint_says_that_the_round_is_done(
    tmp_path: Path,
) -> None:
    events: Events = []
    found = {"test": (np.arange(1), torch.zeros(1, 1))}
    first = Rounds(events, "a", [RoundReport(1, predictions=found), RoundReport(1)], None)
    runner(tmp_path, events, [first])[0].run()
    assert events[:4] == ["a 0", "keeps a", "begins 000001.a.1", "a 1"]


def test_the_active_party_waits_before_it_says_that_it_needs_nobody(tmp_path: Path) -> None:
    events: Events = []
    first = Rounds(events, "a", [RoundReport(1)] * 3, 1)
    runner(tmp_path, events, [first], role="active")[0].run()
    alone = [events[at - 1] for at, event in enumerate(events) if event == "alone"]
    assert alone == ["waits"] * 3


def test_what_is_being_written_is_offered_after_an_interruption(tmp_path: Path) -> None:
    events: Events = []
    made, session = runner(
        tmp_path, events, [Rounds(events, "a", [RoundReport(1)] * 3, None)], lost="a 1"
    )
    made.run()
    assert session.offers == [("",), ("000001.a.1", "")]


def test_a_person_reads_why_the_run_was_interrupted_and_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Events = []
    shown: list[tuple[str, dict[str, Any]]] = []
    made, session = runner(
        tmp_path,
        events,
        [Rounds(events, "a", [RoundReport(1)] * 3, None)],
        lost="a 1",
        show=lambda event, **facts: shown.append((event, facts)),
    )
    begin = session.join
    monkeypatch.setattr(
        session, "join", lambda offer: replace(begin(offer), checkpoint=offer.checkpoints[0])
    )
    tree: dict[str, Any] = {"job": None, "phase": None, "steps": 1, "metrics": {}}
    monkeypatch.setattr(Store, "load", lambda _store, _label: tree)
    monkeypatch.setattr(Rounds, "load_state", lambda _phase, _tree: None)
    made.run()
    assert shown == [
        ("interrupted", {"reason": "p1 is lost"}),
        ("resumed", {"checkpoint": "000001.a.1"}),
    ]


def test_an_error_of_the_disk_ends_the_run_at_the_next_save(tmp_path: Path) -> None:
    events: Events = []
    first = Rounds(events, "a", [RoundReport(1)] * 4, None)
    with raises(InputError, Code.CHECKPOINT_INVALID, names=("a.1", "000001")):
        runner(tmp_path, events, [first], fails="000001.a.1")[0].run()
    assert events == ["a 0", "begins 000001.a.1", "a 1", "closes", "aborts"]


def test_a_checkpoint_is_finished_before_the_run_ends_with_an_error(tmp_path: Path) -> None:
    events: Events = []

    class Broken(Rounds):
        def run_round(self, round_: int) -> RoundReport:
            if round_ == 1:
                raise InputError(Code.FILE_INVALID, "broken")
            return super().run_round(round_)

    with raises(InputError, Code.FILE_INVALID):
        runner(tmp_path, events, [Broken(events, "a", [RoundReport(1)] * 2, None)])[0].run()
    assert events == ["a 0", "begins 000001.a.1", "closes", "waits", "aborts"]
