"""Metrics on a port while a federation runs: what they say at a moment at which everything stands
still.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.harness import cases
from tests.harness.federation import Federation, refused
from tests.harness.proxy import Proxy
from tests.harness.scrape import Samples, key, scrape
from tests.harness.waiting import wait_until
from vfl_common.bundle import Entry

WIDTH, BATCH, ROWS = 64, 32, 200
# 160 training rows.
EPOCH_STEPS = 5
STEP_BYTES = 4 * WIDTH * BATCH
# In epoch 2, within the third step.
HELD_AT = 4096 + EPOCH_STEPS * STEP_BYTES + 4 * WIDTH * 20 + int(2.5 * STEP_BYTES)
WAIT_S = 30.0


Counts = dict[tuple[str, str, str, str], tuple[float, ...]]


def counted(found: Samples) -> Counts:
    """{(peer, phase, kind, direction): (payload bytes, message bytes, messages)}."""
    names = ("vfl_payload_bytes_total", "vfl_message_bytes_total", "vfl_messages_total")
    lines = [dict(labels) for name, labels in found if name == names[0]]
    return {
        (each["peer"], each["phase"], each["kind"], each["direction"]): tuple(
            found[key(name, **each)] for name in names
        )
        for each in lines
    }


def saved(entries: list[Entry]) -> Counts:
    return {
        (each.peer, each.phase, each.kind, each.direction): (
            each.payload_bytes,
            each.message_bytes,
            each.messages,
        )
        for each in entries
    }


def with_peer(name: str, counts: Counts) -> Counts:
    return {link: count for link, count in counts.items() if link[0] == name}


def test_party_and_server_tell_what_they_count(tmp_path: Path) -> None:
    tables = cases.recipe(
        2,
        task={"kind": "binary"},
        model={"embedding_size": WIDTH},
        phase={"epochs": 3, "batch_size": BATCH},
        # Quiet sessions.
        run={"heartbeat_s": 5.0, "lost_after_s": 60.0},
    )
    data = cases.columns("sklearn:breast_cancer", 2, limit=ROWS)
    options = ("--metrics", "127.0.0.1:0")
    with Proxy() as proxy, Federation(tmp_path, tables, data, server_options=options) as federation:
        federation.extra = {"p1": {"active": proxy.address}}
        proxy.hold_at(sent=HELD_AT)
        server = federation.start_server()
        at_server = next(event["address"] for event in server.events if event["event"] == "metrics")

        # A port that is taken: one sentence.
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            refused(federation.start_party("p0", "--metrics", address), "--metrics: ", address)
        # It has told the server so.
        told = with_peer("p0", counted(scrape(at_server)))

        active = federation.start_party("p0", *options)
        proxy.target = active.wait_for("ready")["address"]
        at_active = active.wait_for("metrics")["address"]
        federation.start_party("p1")
        proxy.wait_until_held()

        # Within a step: p1's part is on its way, everybody waits.
        seen = wait_until(
            lambda: scrape(at_active),
            lambda found: (
                found[key("vfl_awaited", peer="p1")] == 1
                and found.get(key("vfl_steps_total", phase="splitnn")) == EPOCH_STEPS + 2
            ),
        )
        assert seen[key("vfl_run_state", state="running")] == 1
        assert seen[key("vfl_round", phase="splitnn")] == 1
        assert seen[key("vfl_rounds", phase="splitnn")] == 3
        assert seen[key("vfl_run_steps")] == EPOCH_STEPS
        assert seen[key("vfl_step_seconds_count", phase="splitnn")] == EPOCH_STEPS + 2
        (line,) = (federation.run_folder / "p0" / "metrics.jsonl").read_text().splitlines()
        loss = json.loads(line)["metrics"]["train"]["loss"]
        assert seen[key("vfl_loss", phase="splitnn", split="train")] == loss
        theirs = scrape(at_server)
        assert theirs[key("vfl_parties", status="joined")] == 2
        assert theirs[key("vfl_run_state", state="running")] == 1

        # The active party writes its ledger when the generation ends: exactly what was scraped.
        federation.programs["p1"].kill()
        server.wait_for("interrupted")
        # Again: its ledger is written by then.
        server.wait_for("joined", party="p0")
        server.wait_for("waiting", missing=["p1"])
        ours = with_peer("p1", counted(seen))
        assert ours == with_peer("p1", saved(federation.ledger("p0")))
        embeddings = ours["p1", "splitnn", "embedding", "received"]
        # An epoch, its validation rows, two steps.
        assert embeddings[0] == 4 * WIDTH * (160 + 20 + 2 * BATCH)

        # Both ends of the session count the same, once nothing is under way.
        def sessions() -> tuple[Counts, Counts]:
            """The active party's count, and the server's as seen from the other end."""
            turned = {"sent": "received", "received": "sent"}
            theirs = with_peer("p0", counted(scrape(at_server)))
            seen_from_here = {
                ("server", phase, kind, turned[way]): tuple(
                    now - then
                    for now, then in zip(
                        n, told.get((p0, phase, kind, way), [0.0] * 3), strict=True
                    )
                )
                for (p0, phase, kind, way), n in theirs.items()
            }
            return with_peer("server", counted(scrape(at_active))), seen_from_here

        both = wait_until(sessions, lambda both: both[0] == both[1])
        assert both[0]
        now = scrape(at_server)
        assert now[key("vfl_run_state", state="waiting")] == 1
        assert {name: now[key("vfl_party_joined", party=name)] for name in ("p0", "p1")} == {
            "p0": 1,
            "p1": 0,
        }
        assert scrape(at_active)[key("vfl_run_state", state="waiting")] == 1

        proxy.release()
        federation.start_party("p1")
        summary = federation.finish()
    assert summary["interruptions"] == 1
    assert summary["metrics"]["validation"]
