"""docs/tutorials/two-machines.md as it stands, on hosts of their own; and what their interfaces
carried beside the ledger.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts import HOSTS_OF, NAMES, Hosts, halves_of_digits, missing
from vfl_common.summary import LinkBytes, Summary, load_summary

REPO = Path(__file__).parents[2]
GUIDE = REPO / "docs" / "tutorials" / "two-machines.md"
RUN_S = 240.0
_WHY = missing()
needs_hosts = pytest.mark.skipif(bool(_WHY), reason=_WHY or "hosts of their own")


@dataclass(frozen=True)
class Step:
    """A block of the guide: commands of a host, or a file of its."""

    host: str
    file: str
    text: str


def guide() -> list[Step]:
    block = r'^```(sh|toml) title="(\w+)(?: ([\w.]+))?"\n(.*?)^```'
    found = re.findall(block, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [Step(host, file, text) for _, host, file, text in found]


def test_the_guide_is_for_these_hosts() -> None:
    steps = guide()
    assert {step.host for step in steps} == set(NAMES)
    assert sum(bool(step.file) for step in steps) == 3
    assert len(steps) > 12
    assert sum("vfl-party run" in step.text for step in steps) == 2


@needs_hosts
def test_the_guide_from_nothing_to_scores(tmp_path: Path) -> None:
    with Hosts(tmp_path, NAMES) as hosts:
        for host in ("bank", "hospital"):
            shutil.copy(REPO / "examples" / "own-files" / f"{host}.csv", hosts.home(host))
        going: list[Any] = []
        for step in guide():
            if step.file:
                (hosts.home(step.host) / step.file).write_text(step.text)
                continue
            for line in step.text.splitlines():
                if going and "report" in line:
                    finish(going)
                if not re.match(r"vfl-(server run|party (run|predict))", line):
                    hosts.run(step.host, line)
                    continue
                program = hosts.start(step.host, line)
                # The server; the active party, which the hospital's check looks for.
                if step.host != "hospital":
                    program.wait_for("ready")
                going.append(program)
        finish(going)
        # What nobody sent.
        for host in NAMES:
            keys = {path.name for path in (tmp_path / host).rglob("*.key")}
            assert keys == ({"ca.key", "server.key"} if host == "fed" else {f"{host}.key"})
            tables = {path.name for path in (tmp_path / host).rglob("*.csv")}
            own = {"fed": set(), "bank": {"bank.csv", "claims.csv"}, "hospital": {"hospital.csv"}}[
                host
            ]
            assert tables == own
        scores = (hosts.home("bank") / "claims.csv").read_text().splitlines()
        assert len(scores) == 1 + 600
        summary = load_summary(hosts.home("bank") / "runs" / "claims-1" / "summary.json")
        assert summary.metrics["test"]["auc"] > 0.6
        assert summary.bytes.agrees


def finish(going: list[Any]) -> None:
    for program in going:
        assert program.wait(RUN_S) == 0, program.stderr
    going.clear()


@needs_hosts
def test_messages_explain_what_the_interfaces_carried(tmp_path: Path) -> None:
    """Embeddings and gradients of 128 KiB: payload <= messages <= TCP <= interface, and little
    comes on top.
    """
    recipe: dict[str, Any] = {
        "name": "bytes",
        "task": {"kind": "multiclass", "classes": 10},
        "parties": [{"name": "bank", "role": "active"}, {"name": "hospital", "role": "passive"}],
        "model": {"embedding_size": 128},
        "phases": [{"kind": "splitnn", "epochs": 12, "batch_size": 256}],
    }
    with Hosts(tmp_path, NAMES) as hosts:
        halves_of_digits(hosts, recipe)
        before = {name: hosts.counters(host) for name, host in HOSTS_OF.items()}
        server = hosts.start("fed", "vfl-server run recipe.toml --listen 0.0.0.0:7000")
        server.wait_for("ready")
        parties = [hosts.start(name, f"vfl-party run {name}.toml") for name in ("bank", "hospital")]
        finish([*parties, server])
        carried = {
            name: _less(hosts.counters(host), before[name]) for name, host in HOSTS_OF.items()
        }
        (path,) = hosts.home("fed").glob("runs/*/summary.json")
        summary = load_summary(path)
    rows = {
        (name, way): _four(summary, name, way, carried[name])
        for name in HOSTS_OF
        for way in ("sent", "received")
    }
    print(json.dumps({f"{name} {way}": row for (name, way), row in rows.items()}))
    for (name, way), (payload, message, tcp, interface) in rows.items():
        assert payload <= message <= tcp <= interface, (name, way, rows[name, way])
    for name in ("bank", "hospital"):
        for way in ("sent", "received"):
            _, message, _, interface = rows[name, way]
            assert message >= 0.97 * interface, (name, way, rows[name, way])
        reported = [each for each in summary.bytes.interfaces if each.party == name]
        assert [each.interface for each in reported] == ["eth0"]
        for ours, theirs in zip(
            (reported[0].sent_bytes, reported[0].received_bytes), carried[name], strict=True
        ):
            # What came after the report is not in it.
            assert 0.99 * theirs < ours <= theirs


def _less(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return now[0] - before[0], now[1] - before[1]


def _four(
    summary: Summary, name: str, way: str, carried: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Payload, message, TCP and interface bytes of one host, one way."""

    def mine(link: LinkBytes) -> bool:
        return (link.sender if way == "sent" else link.receiver) == name

    links = [link for link in summary.bytes.by_link if mine(link)]
    # Of a connection's two ends, the one that watched it for longer.
    most: dict[str, int] = {}
    for each in summary.bytes.tcp:
        if each.party == name:
            count, peer = (each.sent_bytes if way == "sent" else each.received_bytes), each.peer
        elif each.peer == name:
            count, peer = (each.received_bytes if way == "sent" else each.sent_bytes), each.party
        else:
            continue
        most[peer] = max(count, most.get(peer, 0))
    payload, message = (
        sum(getattr(link, key) for link in links) for key in ("payload_bytes", "message_bytes")
    )
    return payload, message, sum(most.values()), carried[0 if way == "sent" else 1]
