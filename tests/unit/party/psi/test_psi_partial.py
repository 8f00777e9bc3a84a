"""``rows.partial``: who gets which rows, compared with plain operations on sets; and what each party
is told, in recorded messages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.aligning import SERVER, Parties, Recorder, changed, sets_of, small_batches
from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.psi import PHASE
from vfl_party.align.aligned import AlignedRows
from vfl_party.align.partial import KEPT

IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
# Few rows have no split for validation and test: then each party has rows for training.
PARTIAL = {"partial": True, "validation": 0.0, "test": 0.0}

small = small_batches()


@st.composite
def families(draw: st.DrawFn) -> list[set[str]]:
    """Draws the sets of 3 or 5 parties, of ids that some of them share."""
    pool = draw(st.lists(IDS, min_size=1, max_size=50, unique=True))
    rows = st.sets(st.sampled_from(pool), min_size=1)
    return [draw(rows) for _ in range(draw(st.sampled_from([3, 5])))]


def check(parties: Parties, found: dict[str, AlignedRows], *, everything: bool = False) -> None:
    """Compares the rows of all parties with plain operations on their sets."""
    active, *passives = parties.sets
    mine = set(parties.sets[active])
    whole = mine & set().union(*(parties.sets[name] for name in passives))
    whole = mine if everything else whole
    order = list(found[active].ids)
    assert sorted(order) == sorted(whole)
    for name in passives:
        held = mine & set(parties.sets[name])
        # In the order of all, of which the party knows its own places.
        assert list(found[name].ids) == [each for each in order if each in held]
        for party in (active, name):
            by = present(found[party].held)
            assert by.by[name].tolist() == [each in held for each in order]
        at_passive = present(found[name].held)
        assert list(at_passive.by) == [name]


@settings(max_examples=25, deadline=None)
@given(families(), st.integers(1, 3))
def test_the_rows_are_those_of_plain_sets(sets: Sequence[set[str]], at_least: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parties = Parties(
            Path(folder), sets_of(*map(tuple, sets)), rows={**PARTIAL, "at_least": at_least}
        )
        mine = set(parties.sets["p0"])
        shared = [mine & set(each) for name, each in parties.sets.items() if name != "p0"]
        if min(map(len, shared)) < at_least:
            with raises(PeerError, Code.ROWS_DIFFER):
                parties.align()
            return
        check(parties, parties.align())
        # The next generation finds the same rows in the same order.
        check(parties, parties.align())


def some(parties: int, rows: int = 60) -> dict[str, tuple[str, ...]]:
    """Returns sets of ids of which each pair shares some, and each party has some for itself."""
    drawn = np.random.default_rng(parties)
    return sets_of(
        *(
            tuple(f"id-{each:03}" for each in drawn.choice(2 * rows, rows, replace=False))
            for _ in range(parties)
        )
    )


@pytest.mark.parametrize("split", ["random", "stratified"])
def test_all_parties_divide_the_rows_alike(split: str, tmp_path: Path) -> None:
    rows = {"partial": True, "split": split, "validation": 0.2, "test": 0.3}
    found = Parties(tmp_path, some(3), rows=rows).align()
    active = present(found["p0"].held)
    n = len(found["p0"].ids)
    assert len(active.splits["test"]) == round(0.3 * n)
    splits = {name: active.splits[name] for name in ("train", "validation", "test")}
    assert sorted(np.concatenate([*splits.values()])) == list(range(n))
    for name in ("p1", "p2"):
        held = present(found[name].held)
        for split_name, places in splits.items():
            np.testing.assert_array_equal(held.splits[split_name], places)
        codes = np.frombuffer(found[name].division or b"", np.uint8)
        assert len(codes) == len(found[name].ids)


def test_the_order_tells_nothing_of_the_rows_between(tmp_path: Path) -> None:
    """It is not that of the ids, and one id more at the active party gives quite another one."""
    sets = some(3)
    first = Parties(tmp_path / "a", sets, rows=PARTIAL).align()["p1"]
    again = Parties(tmp_path / "b", sets, run_id="other", rows=PARTIAL).align()["p1"]
    assert list(first.ids) == list(again.ids) != sorted(first.ids)
    more = {**sets, "p0": tuple(sorted([*sets["p0"], "only here"]))}
    other = Parties(tmp_path / "c", more, rows=PARTIAL).align()["p1"]
    assert sorted(other.ids) == sorted(first.ids)
    places = {name: at for at, name in enumerate(other.ids)}
    moved = sum(places[each] != at for at, each in enumerate(first.ids))
    assert moved > len(first.ids) / 2


def test_each_party_has_as_many_rows_as_wanted(tmp_path: Path) -> None:
    sets = {**some(3), "p2": (*some(3)["p0"][:4], "nobody's")}
    rows = {**PARTIAL, "at_least": 5}
    with raises(PeerError, Code.ROWS_DIFFER, names=("rows.at_least", "rows.id_rules")):
        Parties(tmp_path / "5", sets, rows=rows).align()
    check(fewer := Parties(tmp_path / "4", sets, rows={**PARTIAL, "at_least": 4}), fewer.align())


def test_rows_to_predict_are_all_of_the_active_party(tmp_path: Path) -> None:
    sets = {**some(3), "p2": ("id-000", "nobody's")}
    sets["p0"] = tuple(each for each in sets["p0"] if each != "id-000")
    parties = Parties(tmp_path, sets, rows={"partial": True}, divides=False)
    found = parties.align()
    assert len(found["p2"].ids) == 0
    check(parties, found, everything=True)


# -- who is told what


def told(record: Recorder, sender: str, receiver: str) -> list[tuple[StepKey, dict[str, bytes]]]:
    return [
        (each.step, dict(each.tensors))
        for each in record.said
        if (each.sender, each.receiver) == (sender, receiver)
    ]


@pytest.mark.parametrize("parties", [3, 5])
def test_a_passive_party_is_told_the_same_whoever_else_holds_its_rows(
    parties: int, tmp_path: Path
) -> None:
    """Two runs: the others hold rows of p1 in one, and none in the other, as many rows each time. All
    that p1 is told of its rows is equal, but for what depends on numbers drawn anew.
    """
    sets = some(parties)
    others = set(sets["p0"]) - set(sets["p1"])
    shared = sorted(set(sets["p0"]) & set(sets["p1"]))
    rest = [name for name in sets if name not in ("p0", "p1")]
    worlds = []
    for number, held in enumerate((sorted(others | set(shared)), sorted(others))):
        mine = {name: tuple(held[:60]) for name in rest}
        filled = {
            name: tuple(sorted([*each, *(f"{name}-{at}" for at in range(60 - len(each)))]))
            for name, each in mine.items()
        }
        record = Recorder()
        run = Parties(tmp_path / str(number), {**sets, **filled}, rows=PARTIAL, tap=record)
        assert set(run.align()["p1"].ids) == set(shared)
        state = run.folder_of("p1") / "alignment" / "common.bits"
        worlds.append((record, state.read_bytes(), (run.folder_of("p1") / KEPT).read_text()))
    (first, bits, places), (second, other_bits, other_places) = worlds
    # The salt is drawn anew.
    assert bits[:-32] == other_bits[:-32]
    assert places == other_places
    sizes = [
        [(step, {name: len(data) for name, data in each.items()}) for step, each in told(*pair)]
        for pair in (
            (first, "p0", "p1"),
            (second, "p0", "p1"),
            (first, SERVER, "p1"),
            (second, SERVER, "p1"),
        )
    ]
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]


def test_the_server_tells_the_active_party_alone_who_holds_a_row(tmp_path: Path) -> None:
    record = Recorder()
    run = Parties(tmp_path, some(3), rows=PARTIAL, tap=record)
    run.align()
    bits = {
        each.receiver: len(each.tensors["common"])
        for each in record.said
        if "common" in each.tensors
    }
    one = -(-60 // 8)
    assert bits == {"p0": 2 * one, "p1": one, "p2": one}


def test_the_server_sees_no_place_and_no_key(tmp_path: Path) -> None:
    record = Recorder()
    Parties(tmp_path, some(3), rows=PARTIAL, tap=record).align()
    seen = {name for each in record.said if each.receiver == SERVER for name in each.tensors}
    assert seen == {"sizes", "attempt", "tags", "digest"}


# -- lies


def test_a_server_that_marks_other_rows_is_found(tmp_path: Path) -> None:
    def lie(sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if sender == SERVER and receiver == "p2" and "common" in bundle.tensors:
            bits = bytearray(bundle.tensors["common"].data)
            bits[0] ^= 0x80
            return changed(bundle, "common", bytes(bits))
        return bundle

    _, errors = Parties(tmp_path, some(3), rows=PARTIAL, tap=lie).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.ROWS_DIFFER
    assert_names(str(errors[0]), "everywhere")


@pytest.mark.parametrize(
    "said", [[0, 0], [-1, 1], [10**6, 1]], ids=["twice", "before the first", "behind the last"]
)
def test_places_that_cannot_be_are_refused(said: list[int], tmp_path: Path) -> None:
    def lie(sender: str, _receiver: str, _step: StepKey, bundle: Bundle) -> Bundle:
        if sender == "p0" and "places" in bundle.tensors:
            places = np.frombuffer(bundle.tensors["places"].data, "<i8").copy()
            places[:2] = said
            return changed(bundle, "places", places.tobytes())
        return bundle

    _, errors = Parties(tmp_path, some(3), rows=PARTIAL, tap=lie).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.MALFORMED_MESSAGE
    assert_names(str(errors[0]), "p0")


def test_more_rows_than_a_party_masks_are_refused(tmp_path: Path) -> None:
    """Before memory is taken for them."""

    def lie(sender: str, receiver: str, _step: StepKey, bundle: Bundle) -> Bundle:
        if (sender, receiver) == ("p0", "p1") and "splits" in bundle.tensors:
            return changed(bundle, "splits", np.array([0, 0, 2**40, 0, 0], "<i8").tobytes())
        return bundle

    asks = {"p1": {"peer_rows_at_most": 1000}}
    _, errors = Parties(tmp_path, some(3), rows=PARTIAL, tap=lie, asks=asks).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.MALFORMED_MESSAGE
    assert_names(str(errors[0]), "p0")


def test_a_party_without_training_rows_is_named(tmp_path: Path) -> None:
    rows = {"partial": True, "validation": 0.0, "test": 0.98}
    _, errors = Parties(tmp_path, some(3), rows=rows).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.ROWS_DIFFER
    assert "for training" in str(errors[0])


# -- resuming


def test_a_party_that_comes_back_has_its_rows(tmp_path: Path) -> None:
    parties = Parties(tmp_path, some(3), rows=PARTIAL)
    found = parties.align()
    for name in parties.sets:
        kept = parties.kept(name)
        assert list(kept.ids) == list(found[name].ids)
        assert kept.division == found[name].division
        assert kept.held is not None
        for other, mask in (found[name].held or kept.held).by.items():
            np.testing.assert_array_equal(kept.held.by[other], mask)
    (parties.folder_of("p1") / KEPT).unlink()
    with pytest.raises(InputError) as caught:
        parties.kept("p1")
    assert_names(str(caught.value).replace(str(tmp_path), ""), "places.json", "p1")


def test_known_rows_are_not_found_again(tmp_path: Path) -> None:
    record = Recorder()
    parties = Parties(tmp_path, some(3), rows=PARTIAL)
    first = parties.align()
    parties.tap = record
    again = parties.align()
    assert {name: list(each.ids) for name, each in first.items()} == {
        name: list(each.ids) for name, each in again.items()
    }
    assert not [each for each in record.said if "points" in each.tensors]
    assert {each.step.phase for each in record.said} == {PHASE, "open"}
