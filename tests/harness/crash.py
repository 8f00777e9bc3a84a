"""Deaths at named moments: programs that have this module as a plug-in kill themselves if a test
asks for it.

A test puts an empty file ``kill-<moment>-<name>`` into the federation's folder. The process of that
name removes the file and sends itself SIGKILL when it comes to the moment. With a text in the file,
as the label of a checkpoint, it passes moments whose subject has another name. An empty file
``defect-<name>`` makes the process of that name fail in a stream's thread, as if the product had a
defect there. With a file ``lie-returning`` the server tells the parties whose names are in it that
the others are in the middle of the run. The product has no such hooks: ``crash_plugin`` wraps its
functions in the launcher, before it forks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import _server as grpc_server

from vfl_common.bundle import StepKey
from vfl_common.rpc import session as sessions
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.link import ExchangeLink
from vfl_common.rpc.exchange.service import FramePipe
from vfl_common.rpc.session import Session
from vfl_common.run_folder import RunFolder
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.runtime.run import PartyRun
from vfl_server import app as server_app
from vfl_server.control.conduct import Conduct
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.presence import Presence

# The round in whose middle processes die.
EPOCH = 1
# Moments of single steps: of a passive party's link, of the active party's hub.
STEPS = {
    "first-step": StepKey("splitnn", 0, 0),
    "mid-epoch": StepKey("splitnn", EPOCH, 1),
    "evaluation": StepKey("evaluate", 0, 0),
}
# {moment: who comes to it}. "before-" and "after-" of a step: before it is sent or collected, after
# it is answered.
PARTY = (
    *("join-sent", "start-received", "plan-sent"),
    *(f"{when}-{step}" for step in STEPS for when in ("before", "after")),
    *(
        "round-done",
        "checkpoint-begun",
        "checkpoint-half",
        "checkpoint-unnamed",
        "checkpoint-named",
    ),
    *("before-trained", "after-trained", "report-sent", "complete-heard", "before-finished"),
)
SERVER = (
    *("joined", "before-start", "after-start", "planned", "progress", "lost"),
    *(
        "report",
        "before-summary",
        "after-summary",
        "before-told",
        "after-told",
        "closing",
        "before-finished",
    ),
)


def name() -> str:
    """Returns the name of this process in the recipe."""
    return "server" if Path(sys.argv[0]).name == "vfl-server" else Path(sys.argv[2]).stem


def point(moment: str, subject: str = "") -> None:
    """Ends this process if a test asks for it. ``subject``: the name of what the moment is about."""
    asked = Path(f"kill-{moment}-{name()}")
    if asked.exists() and asked.read_text() in subject:
        asked.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def wrap(
    owner: Any, attribute: str, *, before: Callable[..., None] | None = None, after: Any = None
) -> None:
    """Calls ``before`` with a function's arguments, and ``after`` with its result and arguments."""
    inner = getattr(owner, attribute)

    def outer(*args: Any, **named: Any) -> Any:
        if before is not None:
            before(*args, **named)
        found = inner(*args, **named)
        if after is not None:
            after(found, *args, **named)
        return found

    setattr(owner, attribute, outer)


def _step(when: str) -> Callable[..., None]:
    def look(_self: Any, step: StepKey, *_: Any, **__: Any) -> None:
        for moment, wanted in STEPS.items():
            if step == wanted:
                point(f"{when}-{moment}")

    return look


def _said(_self: Session, message: Any) -> None:
    body = message.WhichOneof("body")
    if body in ("join", "plan", "report"):
        point(f"{body}-sent")


def _noted(when: str) -> Callable[..., None]:
    def look(_self: RunFolder, **facts: Any) -> None:
        if facts.get("trained"):
            point(f"{when}-trained")

    return look


def _half(store: CheckpointStore, file: str, *_: Any) -> None:
    point("checkpoint-begun")
    asked = Path(f"kill-checkpoint-half-{name()}")
    if asked.exists():
        (store._folder / f".tmp-{file}").write_bytes(bytes(1000))
        point("checkpoint-half")


def _renaming(path: Path, _target: Any) -> None:
    if path.name.startswith(".tmp-"):
        point("checkpoint-unnamed")


def _renamed(_found: Any, path: Path, target: Path) -> None:
    if path.name.startswith(".tmp-"):
        point("checkpoint-named", target.name)


def _dropping_result(look: Callable[..., None]) -> Callable[..., None]:
    return lambda _found, *args, **named: look(*args, **named)


def _at(moment: str) -> Callable[..., None]:
    return lambda *_, **__: point(moment)


def _handled(_self: Coordinator, _member: Any, message: Any) -> None:
    moments = {"join": "joined", "plan": "planned", "progress": "progress", "report": "report"}
    body = message.WhichOneof("body")
    if body in moments:
        point(moments[body])


def _writing(when: str) -> Callable[..., None]:
    def look(path: Path, *_: Any, **__: Any) -> None:
        if path.name == "summary.json":
            point(f"{when}-summary")

    return look


def _defect(*_: object) -> None:
    if Path(f"defect-{name()}").exists():
        raise TypeError("a defect that a test asked for")


def _lying(start: Callable[..., None]) -> Callable[..., None]:
    def outer(self: Conduct, member: Any, *, returning: bool = False) -> None:
        asked = Path("lie-returning")
        start(
            self,
            member,
            returning=returning or (asked.exists() and member.name in asked.read_text().split()),
        )

    return outer


def wrap_all() -> None:
    """Wraps the product's functions in this process."""
    for say in ("_send", "_say"):
        wrap(Session, say, after=_dropping_result(_said))
    wrap(sessions, "check_start", before=_at("start-received"))
    wrap(Session, "report", after=_at("complete-heard"))
    wrap(ExchangeLink, "send", before=_step("before"))
    wrap(ExchangeLink, "receive", after=_dropping_result(_step("after")))
    wrap(FramePipe, "deliver", before=_defect)
    wrap(ExchangeHub, "collect", before=_step("before"))
    wrap(ExchangeHub, "reply", after=_dropping_result(_step("after")))
    wrap(PartyRun, "_save_ledger", before=_at("round-done"))
    wrap(CheckpointStore, "_write", before=_half)
    wrap(Path, "rename", before=_renaming, after=_renamed)
    wrap(RunFolder, "note", before=_noted("before"), after=_dropping_result(_noted("after")))
    wrap(RunFolder, "prepare_finished_note", before=_at("before-finished"))
    Conduct._start = _lying(Conduct._start)  # type: ignore[method-assign]
    wrap(Conduct, "_begin", before=_at("before-start"), after=_at("after-start"))
    wrap(Presence, "lose", before=_at("lost"))
    wrap(Coordinator, "handle", after=_dropping_result(_handled))
    wrap(Coordinator, "complete", before=_at("before-told"), after=_at("after-told"))
    wrap(grpc_server._Server, "stop", before=_at("closing"))
    wrap(
        server_app,
        "write_atomic",
        before=_writing("before"),
        after=_dropping_result(_writing("after")),
    )
