"""Contestant ``relayed``: a standing federation, in which all bytes between parties pass the hub.

The hub and a node for each party run on this machine. The nodes only dial out. Also measures the
seconds from ``vfl submit`` to the first step, the memory of the idle hub and of an idle node.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contest import Measurement
from benchmarks.ours import make_recipe, measure_run
from benchmarks.task import Task
from vfl.certs import authority
from vfl.simulation.federation import to_toml
from vfl_common.identity import pem
from vfl_hub.library import NodeClient
from vfl_hub.store import open_store

BIN, HUB, LIMIT_S, _POLL_S = Path(sys.executable).parent, "server", 900.0, 0.02


@contextmanager
def _programs() -> Iterator[list[subprocess.Popen[str]]]:
    programs: list[subprocess.Popen[str]] = []
    try:
        yield programs
    finally:
        for program in reversed(programs):
            program.terminate()
        for program in reversed(programs):
            program.wait(60)


def _start(args: list[str], folder: Path, event: str) -> tuple[subprocess.Popen[str], Any]:
    """Starts a program, and returns it with its first event of this name."""
    program = subprocess.Popen(
        [str(BIN / args[0]), *args[1:]], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    for line in program.stdout:
        facts = json.loads(line)
        if facts["event"] == event:
            return program, facts
    raise RuntimeError(f"{args[0]} ended without the event {event}")


def run(task: Task, workdir: Path) -> Measurement:
    """Trains ``task`` in a federation of a hub and K + 1 nodes."""
    recipe = make_recipe(task, workdir)
    settings = recipe.pop("simulate")
    names = [party["name"] for party in recipe["parties"]]
    certs = workdir / "hub" / "certs"
    authority.create_authority(certs, "vfl")
    authority.issue(certs, HUB)
    store = open_store(workdir / "hub")
    pins = {}
    for name in (HUB, *names):
        if name != HUB:
            authority.issue(certs, name)
        path = certs / f"{name}.pem"
        pins[name] = pem.compute_pin(pem.parse_certificates(pem.read(path), path)[0])
        store.add_member(name, pins[name], ["main"])
    store.close()
    with _programs() as programs:
        hub, ready = _start(["vfl-server", "hub", "--listen", "127.0.0.1:0"], workdir, "ready")
        programs.append(hub)
        for name in names:
            node = {
                "name": name,
                "hub": f"https://{ready['address']}",
                "hub_pin": pins[HUB],
                "folder": f"node-{name}",
                "tls": {
                    "ca": "hub/certs/ca.pem",
                    "certificate": f"hub/certs/{name}.pem",
                    "key": f"hub/certs/{name}.key",
                },
                "data": {
                    "main": {
                        "approval": "automatic",
                        "proposers": names,
                        "party": {
                            "data": settings["parties"][name],
                            "threads": settings["threads"],
                        },
                    }
                },
            }
            (workdir / f"{name}.toml").write_text(to_toml(node))
            programs.append(_start(["vfl-party", "node", f"{name}.toml"], workdir, "connected")[0])
        memory = [psutil.Process(program.pid).memory_info().rss / 2**20 for program in programs]
        node_folder = workdir / f"node-{names[0]}"
        submitted_s = time.time()
        asked = {"recipe": recipe, "data": dict.fromkeys(names, "main")}
        NodeClient(node_folder).ask("/v1/proposals", asked)
        first_s, state = 0.0, ""
        while state != "done":
            if state in ("failed", "stopped") or time.time() - submitted_s > LIMIT_S:
                raise RuntimeError(f"the run is {state} after {time.time() - submitted_s:.0f} s")
            time.sleep(_POLL_S if not first_s else 0.5)
            for row in NodeClient(node_folder).ask("/v1/proposals"):
                state = row["state"]
                if not first_s and row["last"].get("event") == "progress":
                    first_s = row["last"]["at"]
    (summary,) = node_folder.glob("runs/*/*/summary.json")
    facts = {
        "submit_to_first_step_s": first_s - submitted_s,
        "hub_mib": memory[0],
        "node_mib": max(memory[1:]),
    }
    return measure_run(summary.parent, facts)
