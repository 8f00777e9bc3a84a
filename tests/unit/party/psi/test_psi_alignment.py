"""Private alignment: the whole protocol among threads, compared with a plain intersection of
sets.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.aligning import Parties, Recorder, in_common, sets_of, small_batches
from tests.harness.errors import assert_names, raises
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, LostError, PeerError
from vfl_common.psi import PHASE, compute_min_common
from vfl_party.align import rounds
from vfl_party.align.state import SALT_BYTES
from vfl_party.psi.pool import Masking

IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


small = small_batches()


@st.composite
def families(draw: st.DrawFn) -> list[set[str]]:
    """Draws the sets of 2, 3 or 5 parties, of ids that some of them share."""
    pool = draw(st.lists(IDS, min_size=1, max_size=50, unique=True))
    rows = st.sets(st.sampled_from(pool), min_size=1)
    return [draw(rows) for _ in range(draw(st.sampled_from([2, 3, 5])))]


@settings(max_examples=25, deadline=None)
@given(families(), st.integers(1, 3))
def test_the_rows_are_those_of_a_plain_intersection(
    sets: Sequence[set[str]], at_least: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parties = Parties(Path(folder), sets_of(*map(tuple, sets)), rows={"at_least": at_least})
        common = in_common(parties.sets)
        if len(common) < at_least:
            with raises(PeerError, Code.ROWS_DIFFER):
                parties.align()
            return
        for aligned in parties.align().values():
            assert aligned.ids == common


def many(count: int, prefix: str = "ü") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param([many(40)] * 3, id="the same rows"),
        pytest.param([["ü7"]] * 5, id="one row each"),
        pytest.param([["ü7"], many(200)], id="one and many"),
        pytest.param([many(200), ["ü7"]], id="many and one"),
        pytest.param([many(33), ["ü7"], many(200)], id="many in the last of three"),
        pytest.param([["ü7"], many(100), ["ü7", "a"], many(32), many(17)], id="five sizes"),
        pytest.param(
            [["e\u0301", "é", "ü"], ["é", "ü", "\U0001f600"]], id="accents are no other spelling"
        ),
        pytest.param([["a\0", "a", "\0"], ["a", "\0", "a\0\0"]], id="zeros"),
    ],
)
def test_sets_of_any_size(sets: Sequence[Sequence[str]], tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(*sets))
    found = parties.align()
    assert {tuple(each.ids) for each in found.values()} == {in_common(parties.sets)}


def test_processes_mask_as_threads_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "Masking", Masking)
    drawn = np.random.default_rng(3)
    sets = sets_of(
        *(sorted({f"ü{x}" for x in drawn.integers(0, 150, 60 + 30 * k)}) for k in range(3))
    )
    parties = Parties(tmp_path, sets)
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(parties.sets)}


# -- too few rows


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("common", [0, 4])
def test_with_fewer_rows_than_wanted_nobody_learns_which(
    parties: int, common: int, tmp_path: Path
) -> None:
    record = Recorder()
    sets = sets_of(
        *([*many(common, "common"), *many(20, f"{number}-")] for number in range(parties))
    )
    ring = Parties(tmp_path, sets, rows={"at_least": 5}, tap=record)
    found, errors = ring.outcomes()
    assert not found
    for error in errors:
        assert isinstance(error, PeerError)
        assert (error.code, error.exit_code) == (Code.ROWS_DIFFER, 2)
        assert_names(str(error), "rows.at_least", "rows.id_rules")
        assert "\n" not in str(error)
    counted = [
        str(error) for error in errors if f"{common}" in str(error).replace("at_least = 5", "")
    ]
    # Only the server's log says how many.
    assert len(counted) == 1
    assert not [each for each in record.said if "common" in each.tensors]
    # No rows, and no secrets either.
    assert not [*tmp_path.rglob("alignment/*")]


@pytest.mark.parametrize(("at_least", "enough"), [(0.2, True), (0.3, False), (0.07, True)])
def test_a_share_is_of_each_party_s_own_rows(at_least: float, enough: bool, tmp_path: Path) -> None:
    # All of p0's rows, and 20 % of p1's.
    sets = sets_of(many(20), [*many(20), *many(80, "p1-")])
    found, errors = Parties(tmp_path, sets, rows={"at_least": at_least}).outcomes()
    assert bool(found) == enough
    for error in errors:
        assert isinstance(error, PeerError)
        assert error.code is Code.ROWS_DIFFER
        assert_names(str(error), "rows.at_least", "rows.id_rules")


@pytest.mark.parametrize(
    ("at_least", "least"),
    [(1, 1), (1000, 1000), (0.8, 80), (0.07, 7), (0.29, 29), (0.295, 30), (0.001, 1)],
)
def test_the_least_number_of_common_rows_of_a_hundred(at_least: int | float, least: int) -> None:
    assert compute_min_common(at_least, 100) == least


def test_an_earlier_alignment_with_fewer_rows_than_wanted_is_refused(tmp_path: Path) -> None:
    sets = sets_of(many(20), many(10))
    Parties(tmp_path, sets, run_id="first").align()
    again = Parties(tmp_path, sets, run_id="second", rows={"alignment": "first", "at_least": 11})
    found, errors = again.outcomes()
    assert not found
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.ROWS_DIFFER
    assert_names(str(errors[0]), "rows.at_least", "rows.id_rules")


# -- what is kept


def test_only_their_owner_may_read_what_is_kept_and_secrets_go_at_the_end(tmp_path: Path) -> None:
    modes: dict[str, set[int]] = {}

    def look(_sender: str, _receiver: str, _step: StepKey, bundle: Bundle) -> Bundle:
        for path in tmp_path.glob("run/*/alignment*/**/*"):
            try:
                modes.setdefault(path.name, set()).add(stat.S_IMODE(path.stat().st_mode))
            except FileNotFoundError:
                # Renamed meanwhile.
                continue
        for path in tmp_path.glob("run/*/alignment"):
            modes.setdefault("alignment", set()).add(stat.S_IMODE(path.stat().st_mode))
        return bundle

    Parties(tmp_path, sets_of(many(40), many(30), many(20)), tap=look).align()
    assert {
        "state.json",
        "1.points",
        "2.points",
        "3.points",
        "common.bits",
        "alignment",
    } <= modes.keys()
    assert modes.pop("alignment") == {0o700}
    assert set.union(*modes.values()) == {0o600}
    assert [path.name for path in tmp_path.glob("run/*/alignment/*")] == ["common.bits"] * 3


def steps(record: Recorder) -> set[tuple[str, int]]:
    return {(each.step.phase, each.step.round) for each in record.said}


@pytest.mark.parametrize("named", [False, True])
def test_who_knows_the_rows_asks_neither_the_ring_nor_the_server(
    named: bool, tmp_path: Path
) -> None:
    sets = sets_of(many(40), many(30), many(20))
    first = Parties(tmp_path, sets).align()
    record = Recorder()
    rows = {"alignment": "run"} if named else {}
    again = Parties(
        tmp_path, sets, run_id="another" if named else "run", rows=rows, tap=record
    ).align()
    assert again == first
    assert steps(record) == {(PHASE, 0), ("open", 0)}


def test_the_rows_that_an_earlier_release_has_found_are_taken(tmp_path: Path) -> None:
    """It kept no salt."""
    sets = sets_of(many(40), many(30), many(20))
    first = Parties(tmp_path, sets).align()
    for name in sets:
        path = tmp_path / "run" / name / "alignment" / "common.bits"
        path.write_bytes(path.read_bytes()[:-SALT_BYTES])
    assert Parties(tmp_path, sets, run_id="another", rows={"alignment": "run"}).align() == first


def test_an_earlier_alignment_of_other_rows_is_refused(tmp_path: Path) -> None:
    Parties(tmp_path, sets_of(many(40), many(30))).align()
    another = Parties(
        tmp_path, sets_of(many(40), many(31)), run_id="another", rows={"alignment": "run"}
    )
    found, errors = another.outcomes()
    assert not found
    assert isinstance(errors[0], InputError)
    path = tmp_path / "run" / "p1" / "alignment" / "common.bits"
    assert_names(str(errors[0]), "common.bits", "rows.alignment")
    path.unlink()
    _, errors = another.outcomes()


# -- who has left


def test_the_others_do_without_a_party_that_has_left(tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(many(40), many(30), many(20)))
    first = parties.align()
    parties.left = frozenset({"p1"})
    assert parties.align() == {name: first[name] for name in ("p0", "p2")}


def test_what_only_one_that_has_left_could_help_to_find_is_lost(tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(many(40), many(30), many(20)))
    parties.align()
    parties.left = frozenset({"p1"})
    shutil.rmtree(parties.folder_of("p2") / "alignment")
    found, errors = parties.outcomes()
    assert not found
    assert isinstance(errors[0], LostError)
    assert_names(str(errors[0]), "p1")


def test_who_comes_back_without_the_rows_takes_no_others(tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(many(40), many(30)))
    first = parties.align()["p1"]
    assert parties.kept("p1") == first
    shutil.rmtree(parties.folder_of("p1") / "alignment")
    with raises(InputError, Code.DATA_INVALID, names="p1"):
        parties.kept("p1")
