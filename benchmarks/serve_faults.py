"""The passive party of a served model is frozen, killed and slow while single ids come."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from benchmarks.load import Answer, Load, poisson, quantile
from benchmarks.serve_programs import Ours

# Of each stage.
_STAGE_S = 3.0
# In the slow stage: it runs so long, and then stands still.
_RUNS_S, _STANDS_S = 0.02, 0.18


class Stages:
    """What is done to the party, one after the other; ``names``: {stage: when it began}."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self.names: dict[str, float] = {}
        self.ended = False

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.ended = True

    def _run(self) -> None:
        self._stage("both")
        self._stage("frozen", signal.SIGSTOP)
        self._stage("thawed", signal.SIGCONT)
        self._stage("killed", signal.SIGKILL)
        self._ours.programs.by_name["p1"].wait(20)
        self.names["starting"] = time.perf_counter()
        self._ours.start("p1")
        self._stage("attending")
        self.names["slow"] = end_s = time.perf_counter()
        end_s += _STAGE_S
        while time.perf_counter() < end_s:
            self._send(signal.SIGSTOP)
            time.sleep(_STANDS_S)
            self._send(signal.SIGCONT)
            time.sleep(_RUNS_S)
        self._stage("as before")

    def _stage(self, name: str, what: signal.Signals | None = None) -> None:
        self.names[name] = time.perf_counter()
        if what is not None:
            self._send(what)
        time.sleep(_STAGE_S)

    def _send(self, what: signal.Signals) -> None:
        self._ours.programs.by_name["p1"].send_signal(what)


def faults(ours: Ours, requests: Sequence[bytes], rate: float) -> dict[str, Any]:
    """Returns for each stage how long answers took, who was missing, and after how many seconds
    the first row was whole again.
    """
    stages = Stages(ours)
    acting = threading.Thread(target=stages.run)
    acting.start()
    load = poisson(ours.programs.url, requests, lambda: not stages.ended, rate)
    acting.join()
    found = {}
    for name, began_s, answers in _parts(load, stages.names):
        missing = Counter(each.missing for each in answers if each.missing)
        whole = next((each.due_s - began_s for each in answers if not each.missing), None)
        found[name] = {
            "answers": len(answers),
            "p50_ms": quantile(answers, 0.5),
            "p99_ms": quantile(answers, 0.99),
            "over_100_ms": sum(each.ms > 100 for each in answers),
            "missing": dict(missing),
            "first_whole_s": whole,
        }
        click.echo(f"{name:9} " + "  ".join(f"{k} {_said(v)}" for k, v in found[name].items()))
    click.echo(f"failed    {len(load.failed)}")
    return {"failed": len(load.failed), **found}


def _parts(load: Load, names: dict[str, float]) -> Iterator[tuple[str, float, list[Answer]]]:
    ends = [*list(names.values())[1:], float("inf")]
    for (name, began_s), end_s in zip(names.items(), ends, strict=True):
        yield name, began_s, [each for each in load.answers if began_s <= each.due_s < end_s]


def _said(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
