"""Every byte is accounted for: by both ends, by formula, and by the kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cases
from tests.harness.federation import Federation
from tests.harness.memory import in_process
from tests.harness.proxy import Proxy
from vfl_common.bundle import CONTROL, load_entries
from vfl_common.summary import Summary
from vfl_party.record.book import folder_of
from vfl_party.record.history import RecordHistory
from vfl_server.in_process import LocalSession

# Sender, receiver, phase, kind.
Link = tuple[str, str, str, str]
# Payload bytes, message bytes, messages.
Count = tuple[int, int, int]


def table(folder: Path, rows: int, passives: int) -> dict[str, dict[str, Any]]:
    """A made-up binary task: one NPZ file a party, eight columns each. {party: its [data]
    table}.
    """
    rng = np.random.default_rng(5)
    data: dict[str, dict[str, Any]] = {}
    for number in range(passives + 1):
        arrays: dict[str, Any] = {"x": rng.normal(size=(rows, 8)).astype(np.float32)}
        if number == 0:
            arrays["y"] = rng.integers(0, 2, rows)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"p{number}.npz"
        np.savez(path, **arrays)
        data[f"p{number}"] = {"source": path.name} | ({"label": "y"} if number == 0 else {})
    return data


def recipe(
    passives: int, *, width: int, batch: int, epochs: int, validation: float = 0.0
) -> dict[str, Any]:
    return cases.recipe(
        passives + 1,
        task={"kind": "binary"},
        model={"embedding_size": width, "encoder": {"kind": "mlp", "hidden": [8]}},
        phase={"epochs": epochs, "batch_size": batch},
        rows={"validation": validation, "test": 0.0},
    )


def ledgers(federation: Federation) -> tuple[dict[Link, Count], dict[Link, Count]]:
    """What the senders counted, and what the receivers did, from the files that the processes
    left.
    """
    sent: dict[Link, Count] = {}
    received: dict[Link, Count] = {}
    for name in ["server", *federation.names]:
        for entry in federation.ledger(name):
            count = (entry.payload_bytes, entry.message_bytes, entry.messages)
            if entry.direction == "sent":
                sent[name, entry.peer, entry.phase, entry.kind] = count
            else:
                received[entry.peer, name, entry.phase, entry.kind] = count
    return sent, received


def total(counts: dict[Link, Count], phase: str | None = None) -> Count:
    found = [count for link, count in counts.items() if phase in (None, link[2])]
    return tuple(map(sum, zip(*found, strict=True)))  # type: ignore[return-value]


def test_a_heartbeat_before_the_end_of_a_session_is_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats go on after a party has its outcome, until it closes its session."""
    close, closed = LocalSession.close, set[str]()

    def beat(session: LocalSession) -> None:
        if session.me not in closed:
            closed.add(session.me)
            session.ledger.add("server", CONTROL, CONTROL, "sent", 0, 2)
        close(session)

    monkeypatch.setattr(LocalSession, "close", beat)
    tables = recipe(1, width=16, batch=32, epochs=1)
    data = table(tmp_path, 64, 1)
    monkeypatch.chdir(tmp_path)
    in_process(tmp_path / "run", tables, data)
    assert closed == {"p0", "p1"}
    for name in closed:
        entries = load_entries(tmp_path / "run" / name / "ledger.json")
        beats = [entry for entry in entries if (entry.kind, entry.direction) == (CONTROL, "sent")]
        assert [(beat.message_bytes, beat.messages) for beat in beats] == [(2, 1)]


def test_both_ends_of_every_link_count_the_same(tmp_path: Path) -> None:
    tables = recipe(3, width=16, batch=32, epochs=2, validation=0.2)
    tables["phases"].append({"kind": "evaluate", "splits": ["train", "validation"]})
    with Federation(tmp_path, tables, table(tmp_path, 150, 3)) as federation:
        federation.start_all()
        summary = Summary.model_validate(federation.finish())
        sent, received = ledgers(federation)
    assert sent == received
    pairs = {frozenset(link[:2]) for link in sent}
    passives = ["p1", "p2", "p3"]
    # A passive party talks to the server and to the active party, and to nobody else.
    assert pairs == {frozenset(("server", name)) for name in ["p0", *passives]} | {
        frozenset(("p0", name)) for name in passives
    }
    assert {link[2] for link in sent} == {"control", "open", "splitnn", "evaluate"}
    assert summary.bytes.agrees
    # The summary is written before the last words are said to the server: only its control links
    # may be behind.
    in_summary = {
        (link.sender, link.receiver, link.phase, link.kind): (
            link.payload_bytes,
            link.message_bytes,
            link.messages,
        )
        for link in summary.bytes.by_link
    }
    assert in_summary.keys() == sent.keys()
    for link, count in in_summary.items():
        if "server" in link:
            assert all(ours <= theirs for ours, theirs in zip(count, sent[link], strict=True)), link
        else:
            assert count == sent[link], link
    summed = summary.bytes.total
    assert (summed.payload_bytes, summed.message_bytes, summed.messages) == total(in_summary)
    for phase, each in summary.bytes.by_phase.items():
        assert (each.payload_bytes, each.message_bytes, each.messages) == total(
            in_summary, phase
        ), phase
    # The server carries no tensors at all.
    assert total(sent, "control")[0] == 0


def test_the_payload_is_what_the_paper_says(tmp_path: Path) -> None:
    """2·B·E·4 bytes a passive party and step; validation sends embeddings and gets nothing back."""
    width, batch, epochs = 64, 256, 3
    # Two full batches and one of 128.
    train, validation = 640, 160
    with Federation(
        tmp_path,
        recipe(2, width=width, batch=batch, epochs=epochs, validation=0.2),
        table(tmp_path, 800, 2),
    ) as federation:
        federation.start_all()
        federation.finish()
        sent, _ = ledgers(federation)
    for name in ("p1", "p2"):
        up, down = sent[name, "p0", "splitnn", "embedding"], sent["p0", name, "splitnn", "gradient"]
        assert up[0] == epochs * (train + validation) * width * 4
        assert down[0] == epochs * train * width * 4
        ratios = [count[1] / count[0] for count in (up, down)]
        print(
            f"{name}: message bytes / payload: embeddings {ratios[0]:.5f}, gradients {ratios[1]:.5f}"
        )
        assert max(ratios) <= 1.01
        # A bundle of 64 KiB is one message.
        assert (up[2], down[2]) == (epochs * 4, epochs * 3)
        assert sent["p0", name, "splitnn", "ack"][0] == 0
        assert sent[name, "p0", "open", "rows"][0] == 8 + 32


@pytest.mark.parametrize(("width", "frames"), [(256, 1), (1024, 2)])
def test_the_kernel_counts_little_more(
    width: int, frames: int, tmp_path: Path, record_property: Any
) -> None:
    """TLS, HTTP/2 and everything else add less than 3 % to bundles of 1 MiB and more."""
    with Federation(
        tmp_path, recipe(2, width=width, batch=1024, epochs=4), table(tmp_path, 2048, 2)
    ) as federation:
        federation.start_all()
        summary = Summary.model_validate(federation.finish())
        sent, _ = ledgers(federation)
    assert sent["p1", "p0", "splitnn", "embedding"][2] == 8 * frames
    messages: Counter[tuple[str, str]] = Counter()
    for (sender, receiver, _, _), count in sent.items():
        messages[sender, receiver] += count[1]
    kernel = {(count.party, count.peer): count for count in summary.bytes.tcp}
    assert {pair for pair in kernel if "server" not in pair} == {
        ("p0", "p1"),
        ("p0", "p2"),
        ("p1", "p0"),
        ("p2", "p0"),
    }
    for (party, peer), tcp in kernel.items():
        if "server" in (party, peer):
            continue
        ratios = (
            tcp.sent_bytes / messages[party, peer],
            tcp.received_bytes / messages[peer, party],
        )
        print(
            f"{party} with {peer}: TCP bytes / message bytes: sent {ratios[0]:.5f}, received {ratios[1]:.5f}"
        )
        # As sent, the kernel counts what was acknowledged: a last acknowledgement may be on its way
        # still.
        assert 1.0 < ratios[1] < 1.03, f"{party} {peer} {ratios}"
        assert 0.999 < ratios[0] < 1.03, f"{party} {peer} {ratios}"


def test_the_kernel_and_a_proxy_count_the_same(tmp_path: Path) -> None:
    """What TCP_INFO says of p1's connection is what really went through, byte by byte, but for the
    closing words.
    """
    with (
        Proxy() as proxy,
        Federation(
            tmp_path,
            recipe(1, width=64, batch=256, epochs=2),
            table(tmp_path, 512, 1),
            {"p1": {"active": proxy.address}},
        ) as federation,
    ):
        federation.start_server()
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        federation.start_party("p1")
        summary = Summary.model_validate(federation.finish())
    (count,) = [count for count in summary.bytes.tcp if (count.party, count.peer) == ("p1", "p0")]
    # The first, at the certificate, is over before anything is counted.
    _look, (sent, received) = proxy.each
    assert 0 <= sent - count.sent_bytes < 512
    assert 0 <= received - count.received_bytes < 512


def test_after_a_kill_the_summary_says_which_links_disagree(tmp_path: Path) -> None:
    """What a killed process had counted since its last checkpoint is lost; nothing pretends that it
    is not.
    """
    tables = recipe(2, width=64, batch=64, epochs=4)
    data = table(tmp_path, 256, 2)
    with (
        Proxy() as proxy,
        Federation(tmp_path, tables, data, {"p2": {"active": proxy.address}}) as federation,
    ):
        # In the second epoch.
        proxy.hold_at(sent=4096 + 256 * 64 * 4 + 64 * 64 * 4 * 3 // 2)
        federation.start_server()
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        federation.start_party("p1")
        federation.start_party("p2")
        proxy.wait_until_held()
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p2")
        summary = Summary.model_validate(federation.finish())
        sent, received = ledgers(federation)
        recorded: Counter[Link] = Counter()
        for name in federation.names:
            folder = folder_of(tmp_path / "runs", name)
            for each in RecordHistory(folder).disclosures():
                for peer in each.to:
                    link = (name, peer, each.way.phase, each.way.kind)
                    recorded[link] += each.payload_bytes
    # What others got is in the sender's record, also of what the killed process had sent.
    for link, count in received.items():
        if link[0] in federation.names and link[2] != "control":
            assert recorded[link] >= count[0], link
    assert (
        recorded["p2", "p0", "splitnn", "embedding"] > sent["p2", "p0", "splitnn", "embedding"][0]
    )
    assert not summary.bytes.agrees
    differing = {
        link for link in sent.keys() | received.keys() if sent.get(link) != received.get(link)
    }
    assert {
        f"{s} -> {r}, {phase}, {kind}" for s, r, phase, kind in differing if "server" not in (s, r)
    } == set(summary.bytes.disagreements)
    # Between the living, what was under way when the generation ended may be lost: one bundle.
    for link in differing:
        lost = sent.get(link, (0, 0, 0))[0] - received.get(link, (0, 0, 0))[0]
        assert "p2" in link or 0 <= lost <= 64 * 64 * 4 or "server" in link
    # What the four epochs need; the one that was begun twice comes on top.
    minimum = 4 * 256 * 64 * 4
    assert sent["p1", "p0", "splitnn", "embedding"][0] > minimum
    assert received["p2", "p0", "splitnn", "embedding"][0] > minimum
