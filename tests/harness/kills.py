"""Runs a federation whose processes die at named moments, each once, and starts whoever has died
again.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness import cases, ports
from tests.harness.crash import PARTY, SERVER
from tests.harness.federation import RUN_S, Federation
from tests.harness.plugins import environment, metadata
from tests.harness.recorded import of_ledger, of_record
from vfl_party.record.book import LINES, folder_of

PARTIES = ("p0", "p1", "p2")
VICTIMS = {
    "server": ("server",),
    "active": ("p0",),
    "passive": ("p1",),
    "two": ("p0", "p2"),
    "all": (*PARTIES, "server"),
}
# With a late_policy: moments of training, and of what surrounds it.
LENIENT = {
    "server": ("after-start", "planned", "progress", "report"),
    "party": (
        *(
            "start-received",
            "plan-sent",
            "before-first-step",
            "after-first-step",
            "before-mid-epoch",
        ),
        *(
            "after-mid-epoch",
            "round-done",
            "checkpoint-begun",
            "checkpoint-unnamed",
            "checkpoint-named",
        ),
    ),
}
# {late_policy: of the model}.
POLICIES = {"wait": {}, "cached": {"combine": "concat"}, "skip": {"combine": "mean"}}
DEADLINE_S = 1.0
# For whom others wait: for a party, for a server.
WAIT_S = 15.0
# If a victim comes back when all others have ended: it waits for them in vain.
ALONE_S = 5.0
ALONE = {("active", "report-sent"), ("server", "closing"), ("server", "before-finished")}
REPO = Path(__file__).parents[2]
DATA = cases.columns("sklearn:digits", 3, limit=100)


def recipe(seed: int = 7, wait_s: float = WAIT_S, policy: str = "wait") -> dict[str, object]:
    """State of every sort: Adam's moments, dropout's generators; an evaluation at the end."""
    made = cases.recipe(
        3,
        seed=seed,
        model={"encoder": {"kind": "mlp", "hidden": [16], "dropout": 0.2}} | POLICIES[policy],
        run={"heartbeat_s": 0.2, "lost_after_s": 5.0, "rejoin_deadline_s": wait_s},
    )
    phase = {
        "kind": "splitnn",
        "epochs": 4,
        "batch_size": 24,
        "optimizer": {"kind": "adam", "lr": 0.01},
    }
    late = {} if policy == "wait" else {"late_policy": policy, "deadline_s": DEADLINE_S}
    return made | {"phases": [phase | late, {"kind": "evaluate"}]}


def cells(policy: str = "wait") -> Iterator[tuple[str, str]]:
    """(victims, moment): all moments to which these victims come; with a late_policy some."""
    moments = {"server": SERVER, "party": PARTY} if policy == "wait" else LENIENT
    for who in VICTIMS:
        yield from itertools.product([who], moments["server" if who == "server" else "party"])


def named(federation: Federation) -> list[str]:
    """What the summary says of parties that have not taken part in all of the training."""
    summary = json.loads((federation.run_folder / "summary.json").read_text())
    found = [f"{each['steps']} steps without {each['party']}" for each in summary["absences"]]
    for party in summary["parties"]:
        found += [
            f"{party[key]} {key} of {party['name']}"
            for key in ("returns", "skipped_rounds")
            if party[key]
        ]
    return found


def plugged(folder: Path) -> dict[str, str]:
    """Returns the environment of programs that have the deaths as a plug-in."""
    return environment(
        metadata(folder, {"vfl.methods": {"crashes": "tests.harness.crash_plugin:METHOD"}}), REPO
    )


class Killed(Federation):
    """A federation of programs with deaths."""

    plugin: dict[str, str]
    wait_s = WAIT_S

    def start_one(self, name: str) -> None:
        """Starts a program, or starts it again with the same command."""
        if name == "server":
            args = [
                "vfl-server",
                "run",
                "recipe.toml",
                "--listen",
                self.address or ports.address(),
                *self.server_options,
            ]
            self.address = self.start(name, *args, environment=self.plugin).wait_for("ready")[
                "address"
            ]
        else:
            path = self.write_party(name).name
            self.start(
                name, "vfl-party", "run", path, "--wait", str(self.wait_s), environment=self.plugin
            )


def killed(federation: Killed, victim: str, moment: str) -> None:
    """Starts everybody, and waits until the victim has died at ``moment``."""
    (federation.folder / f"kill-{moment}-{victim}").touch()
    for name in ("server", *federation.names):
        federation.start_one(name)
    assert federation.programs[victim].wait() == -signal.SIGKILL, federation.programs[victim].stderr


def run(
    folder: Path, plugin: dict[str, str], who: str, moment: str, seed: int = 7, policy: str = "wait"
) -> Killed:
    """Runs to the end; returns the federation, closed. Fails unless all end with 0, in one run.

    The first of the VICTIMS dies when it comes to ``moment``, and must come to it; the others are
    killed then.
    """
    wait_s = ALONE_S if (who, moment) in ALONE else WAIT_S
    with Killed(folder, recipe(seed, wait_s, policy), DATA) as federation:
        federation.plugin, federation.wait_s = plugin, wait_s
        survive(federation, VICTIMS[who], moment)
        require_recorded(federation)
        return federation


def require_recorded(federation: Federation) -> None:
    """Raises AssertionError if a record has a torn line, or if something has come to a party that
    the sender's record lacks. A party that was killed has lost some of its own counts.
    """
    runs = federation.folder / "runs"
    records = {name: of_record(runs, name) for name in federation.names}
    for name in federation.names:
        assert (folder_of(runs, name) / LINES).read_bytes().endswith(b"\n"), name
        came = of_ledger(federation.ledger(name), "received")
        for (sender, phase, kind, what), count in came.items():
            if sender in records:
                assert records[sender][name, phase, kind, what] >= count, (sender, name, phase)


def survive(federation: Killed, victims: Sequence[str], moment: str) -> None:
    """Runs a federation to its end, as ``run`` does."""
    everybody = ("server", *federation.names)
    asked, others = federation.folder / f"kill-{moment}-{victims[0]}", victims[1:]
    asked.touch()
    for name in everybody:
        federation.start_one(name)
    give_up_s = time.monotonic() + RUN_S
    while True:
        if not asked.exists():
            for name in others:
                federation.programs[name].kill()
            others = ()
        codes = {name: program.process.poll() for name, program in federation.programs.items()}
        for name, code in codes.items():
            if code == -signal.SIGKILL:
                federation.start_one(name)
            elif code not in (None, 0):
                raise AssertionError(
                    f"{name} ended with {code}: {federation.programs[name].stderr}"
                )
        if all(code == 0 for code in codes.values()):
            # Nobody is started again who has ended with 0.
            break
        assert time.monotonic() < give_up_s, (
            f"still running: {[n for n, c in codes.items() if c is None]}"
        )
        time.sleep(0.02)
    assert not asked.exists(), f"{victims[0]} never came to {moment}"
    runs = [path for path in (federation.folder / "runs").glob("[!.]*") if path.is_dir()]
    assert len(runs) == 1, f"{len(runs)} runs"
    for name in everybody:
        assert json.loads((runs[0] / name / "run.json").read_text()).get("finished"), (
            f"{name} is not finished"
        )
