"""Private alignment of two parties by RR22."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.aligning import (
    WAIT_S,
    Parties,
    Recorder,
    changed,
    in_common,
    sets_of,
    small_batches,
)
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.psi import PHASE
from vfl_party.align import buckets, meeting
from vfl_party.align.exchanges import count_turn_steps, rr22_occurrences
from vfl_party.rr22 import relay, turns

small = small_batches()
ENGINE = {"psi": {"engine": "rr22"}}
needs_engine = pytest.mark.skipif(
    bool(relay.explain_absence()), reason=f"needs the wheel spu: {relay.INSTALL}"
)


@pytest.fixture
def tiny_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes two parties of 2,000 rows use several buckets."""
    monkeypatch.setattr(turns, "MAX_ROWS", 1024)


def random_sets(seed: int, first: int, second: int, common: int) -> dict[str, tuple[str, ...]]:
    """Returns sets of these sizes with ``common`` ids in common, and a few odd ids."""
    draw = random.Random(seed)  # noqa: S311 - a test's data
    odd = ["", ",", '"', "a\nb", "ü", "x,1", "0" * 300]
    ids = [f"{draw.getrandbits(48):x}-{number}" for number in range(first + second - common)]
    shared = ids[:common]
    shared[: len(odd)] = odd[: len(shared)]
    return sets_of(shared + ids[common:first], shared + ids[first:])


@needs_engine
@pytest.mark.parametrize(
    ("first", "second", "common"),
    [(1, 1, 1), (1, 1, 0), (1, 3000, 1), (900, 5, 0), (1000, 1200, 700), (1023, 1023, 1023)],
)
def test_the_common_rows_are_those_of_plain_sets(
    tmp_path: Path, first: int, second: int, common: int
) -> None:
    sets = random_sets(first + second, first, second, common)
    both = Parties(tmp_path, sets, rows=ENGINE)
    if not common:
        with pytest.raises(PeerError) as failed:
            both.align()
        assert failed.value.code is Code.ROWS_DIFFER
        return
    found = both.align()
    assert {tuple(each.ids) for each in found.values()} == {in_common(sets)}
    # Nothing of the engine stays, and a returning party knows its rows.
    assert [each.name for each in (both.folder_of("p0") / "alignment").iterdir()] == ["common.bits"]
    assert both.kept("p1").ids == in_common(sets)


@needs_engine
@pytest.mark.usefixtures("tiny_buckets")
def test_both_engines_find_the_same_rows_in_several_buckets(tmp_path: Path) -> None:
    sets = random_sets(7, 2500, 2200, 1300)
    found = [
        Parties(tmp_path / name, sets, rows={"psi": {"engine": name}}).align()["p1"].ids
        for name in ("rr22", "x25519")
    ]
    assert found[0] == found[1] == in_common(sets)


@needs_engine
@pytest.mark.usefixtures("tiny_buckets")
def test_all_that_leaves_has_the_sizes_of_the_forecast(tmp_path: Path) -> None:
    # The number of common rows changes no size.
    for common in (3, 2000):
        recorder = Recorder()
        sets = random_sets(common, 2000, 2000, common)
        Parties(tmp_path / str(common), sets, rows=ENGINE, tap=recorder).align()
        sent = {
            (each.step, each.sender): sum(map(len, each.tensors.values())) for each in recorder.said
        }
        expected = [each for each in rr22_occurrences(2000) if each.exchange.name == "rr22"]
        assert len(expected) == sum(step.round == 1 for step, _ in sent) / 2
        for each in expected:
            sizes = dict(each.sizes)
            assert (sent[each.step, "p1"], sent[each.step, "p0"]) == (sizes["up"], sizes["down"])


@needs_engine
@pytest.mark.parametrize("rows", turns._SIZES)
def test_the_engine_sends_what_the_turns_have_room_for(tmp_path: Path, rows: int) -> None:
    # The turns are nearly full: room for names of steps is all that is left.
    for party in "ab":
        (tmp_path / party).mkdir()
    held = rows - 1 - turns.count_probes(rows)
    room = (1, rows, turns.count_probes(rows))
    ids = [str(number) for number in range(held)]
    sources = [next(buckets.deal(ids, bytes(32), *room, tmp_path / party)) for party in "ab"]
    results = [each.with_suffix(".out") for each in sources]
    with (
        relay.Engine(sources[0], results[0], 0, "b") as active,
        relay.Engine(sources[1], results[1], 1, "a") as passive,
    ):
        for turn in turns.make_turns(rows, rows):
            up = passive.collect(turn.up)
            active.deliver(up, turn.up)
            down = active.collect(turn.down)
            passive.deliver(down, turn.down)
            for data, part in ((up, turn.up), (down, turn.down)):
                used = len(data.rstrip(b"\0"))
                assert part.size - used <= 128 * max(1, part.messages)
        for engine, result in ((active, results[0]), (passive, results[1])):
            engine.finish()
            assert len(buckets.read_rows(result, rows, room[2], "b")) == held


@needs_engine
@pytest.mark.usefixtures("tiny_buckets")
@pytest.mark.parametrize("stop", [0, 9, 25, 40])
def test_a_run_that_stops_loses_one_bucket(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = random_sets(3, 2500, 2400, 1500)

    def end(_sender: str, _receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if step == StepKey(PHASE, 1, stop):
            raise InputError(Code.INTERRUPTED, "the party ends here")
        return bundle

    both = Parties(tmp_path, sets, rows=ENGINE, tap=end)
    _, errors = both.outcomes()
    assert errors
    ran: list[int] = []
    original = buckets.BucketRounds._intersect_bucket

    def count(self: buckets.BucketRounds, bucket: int, *rest: Any) -> Any:
        ran.append(bucket)
        return original(self, bucket, *rest)

    monkeypatch.setattr(buckets.BucketRounds, "_intersect_bucket", count)
    counted: list[str] = []
    asks = {name: {"begins": partial(counted.append, name)} for name in sets}
    resumed = Parties(tmp_path, sets, rows=ENGINE, asks=asks)
    assert resumed.align()["p0"].ids == in_common(sets)
    division = turns.divide(2500, 2400)
    first = stop // count_turn_steps(division)
    # A party that comes back may have other ids, so it uses up one alignment of the day.
    assert sorted(counted) == ["p0", "p1"]
    assert sorted(ran) == sorted([*range(first, division.number)] * 2)


@needs_engine
def test_an_engine_that_is_killed_ends_the_run_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = relay.Engine.__enter__

    def enter_and_kill(self: relay.Engine) -> relay.Engine:
        engine = entered(self)
        if self._rank == 1:
            self._process.send_signal(signal.SIGKILL)
        return engine

    monkeypatch.setattr(relay.Engine, "__enter__", enter_and_kill)
    with pytest.raises(InputError, match=r"the engine rr22 of this party ended \(got -9"):
        Parties(tmp_path, random_sets(1, 50, 50, 20), rows=ENGINE).align()


@needs_engine
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_asks_until_a_slow_peer_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    asked = threading.Event()
    deliver, hand_over = relay.Engine.deliver, relay.Engine._hand_over

    def deliver_late(self: relay.Engine, data: bytes, part: turns.Part) -> None:
        if self._rank == rank and any(b"P2P" in name for name in part.names):
            assert asked.wait(WAIT_S)
        deliver(self, data, part)

    def note(self: relay.Engine, name: bytes, value: bytes, number: int | None = None) -> None:
        if self._rank == rank and value == relay._BUSY:
            asked.set()
        hand_over(self, name, value, number)

    monkeypatch.setattr(relay.Engine, "deliver", deliver_late)
    monkeypatch.setattr(relay.Engine, "_hand_over", note)
    sets = random_sets(1, 500, 400, 200)
    assert Parties(tmp_path, sets, rows=ENGINE).align()["p1"].ids == in_common(sets)


@needs_engine
def test_rows_that_one_party_loses_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = buckets.read_rows

    def lose(result: Path, rows: int, probes: int, party: str) -> Any:
        return read(result, rows, probes, party)[party == "p0" :]

    monkeypatch.setattr(buckets, "read_rows", lose)
    with pytest.raises(PeerError, match="do not take the same rows"):
        Parties(tmp_path, random_sets(1, 500, 500, 200), rows=ENGINE).align()


@needs_engine
def test_rows_that_both_parties_lose_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The wheel's other mode loses 19 of 5,000 rows at both parties (secretflow/psi#370), with sets of
    # this size and messages of these sizes.
    monkeypatch.setattr(turns, "_SIZES", {10_000: (1280, 7 * 64 + 10, 102_872)})
    monkeypatch.setattr(turns, "MAX_ROWS", 10_000)
    monkeypatch.setattr(turns, "_ROWS_A_PROBE", 2)
    monkeypatch.setattr(relay, "ENGINE", tmp_path / "lossy.py")
    text = Path(relay.__file__).with_name("engine.py").read_text()
    (tmp_path / "lossy.py").write_text(text.replace("low_comm_mode=False", "low_comm_mode=True"))
    with pytest.raises(PeerError, match=r"loses rows: it found 4,9\d\d of 5,000 rows"):
        Parties(tmp_path, random_sets(1, 4900, 4900, 2000), rows=ENGINE).align()


@needs_engine
@pytest.mark.parametrize(
    ("sender", "turn", "position", "value"),
    [
        # The length of a name, that of a content, and the padding.
        ("p1", 0, 0, b"\xff"),
        ("p1", 0, 1, b"\xff\xff\xff\xff"),
        ("p1", 0, -1, b"x"),
        # A name; that a stage is not finished; the number of rows.
        ("p1", 2, 5, b"cell"),
        ("p1", 1, 25, b"p_unfinish"),
        ("p1", 4, 22, b"\x80\x40"),
        ("p0", 7, 27, b"\x80\x40"),
        # The positions of common rows.
        ("p0", 11, 40, b"\xff" * 8),
    ],
)
def test_a_malformed_turn_names_its_sender(
    tmp_path: Path, sender: str, turn: int, position: int, value: bytes
) -> None:
    def change(from_: str, _receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if from_ != sender or step != StepKey(PHASE, 1, turn):
            return bundle
        data = bytearray(bundle.tensors["messages"].data)
        at = position % len(data)
        data[at : at + len(value)] = value
        return changed(bundle, "messages", bytes(data))

    both = Parties(tmp_path, random_sets(1, 50, 50, 20), rows=ENGINE, tap=change)
    _, errors = both.outcomes()
    first = errors[0]
    assert isinstance(first, PeerError)
    assert (first.code, first.party) == (Code.MALFORMED_MESSAGE, sender)
    assert "malformed turn" in str(first)


@needs_engine
def test_the_name_of_a_folder_may_have_blanks_and_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine passes names of files to a shell.
    monkeypatch.chdir(tmp_path)
    sets = random_sets(1, 50, 50, 20)
    found = Parties(Path("my runs;touch x;"), sets, rows=ENGINE).align()
    assert found["p1"].ids == in_common(sets)
    assert [each.name for each in tmp_path.iterdir()] == ["my runs;touch x;"]


@needs_engine
def test_an_active_party_cannot_change_the_engine_of_the_recipe(tmp_path: Path) -> None:
    def change(sender: str, _receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if sender != "p0" or "introductions" not in bundle.tensors:
            return bundle
        return changed(bundle, "rr22", b"\0")

    both = Parties(tmp_path, random_sets(1, 50, 50, 20), rows=ENGINE, tap=change)
    _, errors = both.outcomes()
    assert "begins an alignment by x25519" in str(errors[0])


@needs_engine
def test_auto_takes_rr22_for_large_tables_of_two_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MIN_ROWS", 300)
    cases: tuple[tuple[dict[str, Any], int, bool], ...] = (
        ({}, 400, True),
        ({}, 200, False),
        ({"at_least": 2}, 400, False),
        ({"partial": True}, 400, False),
        ({"psi": {"engine": "x25519"}}, 400, False),
    )
    for number, (rows, size, expected) in enumerate(cases):
        recorder = Recorder()
        sets = random_sets(number, size, size, 90)
        Parties(tmp_path / str(number), sets, rows=rows, tap=recorder).align()
        assert any("messages" in each.tensors for each in recorder.said) == expected


def test_auto_falls_back_without_the_wheel_and_rr22_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MIN_ROWS", 10)
    monkeypatch.setattr(relay, "explain_absence", lambda: "the wheel spu is not installed")
    sets = random_sets(1, 50, 50, 20)
    assert Parties(tmp_path / "auto", sets).align()["p0"].ids == in_common(sets)
    with pytest.raises(InputError, match=r"the wheel spu is not installed.*--no-deps"):
        Parties(tmp_path / "rr22", sets, rows=ENGINE).align()


@pytest.mark.parametrize(("active", "passive"), [(1, 1), (1023, 3), (10**6, 10**6), (10**7, 20)])
def test_buckets_have_room_for_all_rows(active: int, passive: int) -> None:
    found = turns.divide(active, passive)
    for rows, padded in ((active, found.active), (passive, found.passive)):
        mean = rows / found.number
        assert padded in turns._SIZES
        assert padded > (rows if found.number == 1 else mean + 7.5 * mean**0.5)


def test_nothing_of_the_wheel_is_imported_by_a_party() -> None:
    code = "import sys, vfl_party.align; print([m for m in sys.modules if m.startswith('spu')])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == "[]\n"
