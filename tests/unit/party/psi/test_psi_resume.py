"""Private alignment that is interrupted: it goes on where it was, with the same secrets, and gives
the same rows.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.aligning import (
    Direct,
    Parties,
    Recorder,
    Said,
    in_common,
    sets_of,
    small_batches,
)
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import InterruptedRun
from vfl_common.psi import PHASE

BATCH = 4
SETS = sets_of(
    [f"id-{number}" for number in range(11)],
    [f"id-{number}" for number in range(2, 17)],
    [f"id-{number}" for number in range(5, 14)],
)
# A party masks its own rows two batches ahead, and another's set as it comes: so much may be lost
# at each.
LOST = 3 + 2


small = small_batches(BATCH)


class Interrupting(Recorder):
    """Raises InterruptedRun instead of sending the bundle of this number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if len(self.said) >= self._at:
            raise InterruptedRun("a test asked for it")
        return super().__call__(sender, receiver, step, bundle)


def state(parties: Parties, name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(
        (parties.folder_of(name) / "alignment" / "state.json").read_text()
    )
    return found


def first_shown(said: list[Said]) -> dict[tuple[str, int], bytes]:
    """{(party, batch): its rows under its own key}: of those that go straight to the next party."""
    found = [each for each in said if (each.step.phase, each.step.round) == (PHASE, 1)]
    return {
        (each.sender, each.step.batch): each.tensors["points"]
        for each in found
        if (each.sender, each.receiver) in (("p0", "p1"), ("p2", "p0"))
    }


def bundles() -> int:
    """How many bundles a whole alignment sends."""
    batches = -(-max(map(len, SETS.values())) // BATCH)
    return 4 + 2 * batches * 4 + 6 + 6 + 6 + 4


@pytest.mark.slow
@pytest.mark.parametrize("at", range(bundles()))
def test_it_goes_on_after_an_interruption_at_any_bundle(at: int, tmp_path: Path) -> None:
    parties = Parties(tmp_path, SETS, tap=(before := Interrupting(at)))
    started = Direct.batches
    found, errors = parties.outcomes()
    assert errors
    assert all(isinstance(each, InterruptedRun) for each in errors)
    # Who has finished, has finished well.
    assert {tuple(each.ids) for each in found.values()} <= {in_common(SETS)}
    parties.tap = after = Recorder()
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(SETS)}
    whole = sum(-(-len(ids) // BATCH) for ids in SETS.values()) * len(SETS)
    assert whole <= Direct.batches - started <= whole + LOST * len(SETS)
    one, other = first_shown(before.said), first_shown(after.said)
    assert all(one[batch] == other[batch] for batch in one.keys() & other.keys())
    assert [path.name for path in tmp_path.glob("run/*/alignment/*")] == ["common.bits"] * 3


def test_the_interruptions_above_are_at_all_bundles(tmp_path: Path) -> None:
    Parties(tmp_path, SETS, tap=(record := Recorder())).align()
    assert len(record.said) == bundles()


def interrupted(folder: Path, bundles_sent: int = 24) -> Parties:
    parties = Parties(folder, SETS, tap=Interrupting(bundles_sent))
    parties.outcomes()
    return parties


def test_it_takes_up_again_what_is_kept(tmp_path: Path) -> None:
    parties = interrupted(tmp_path)
    before = {name: state(parties, name) for name in SETS}
    parties.tap = look = Interrupting(10)
    parties.outcomes()
    assert {name: state(parties, name) for name in SETS} == before
    assert min((each.step.round, each.step.batch) for each in look.said if each.step.round > 0) > (
        1,
        0,
    )


def test_a_file_that_was_being_written_is_cut_to_whole_batches(tmp_path: Path) -> None:
    parties = interrupted(tmp_path)
    for path in tmp_path.glob("run/*/alignment/1.points"):
        with path.open("ab") as file:
            file.write(b"half of a batch")
    parties.tap = Recorder()
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(SETS)}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("how", ["other rows", "lost", "damaged"])
def test_with_other_rows_or_without_its_folder_a_party_makes_all_begin_anew(
    how: str, name: str, tmp_path: Path
) -> None:
    parties = interrupted(tmp_path)
    before = {each: state(parties, each) for each in SETS}
    if how == "other rows":
        parties.sets = {**SETS, name: (*SETS[name][:-1], "id-9x")}
    elif how == "lost":
        shutil.rmtree(parties.folder_of(name) / "alignment")
    else:
        (parties.folder_of(name) / "alignment" / "state.json").write_text("{")
    parties.tap = Interrupting(24)
    parties.outcomes()
    for each in SETS:
        for secret in ("name", "secret", "seed"):
            assert state(parties, each)[secret] != before[each][secret]
    parties.tap = Recorder()
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(parties.sets)}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("how", ["other rows", "lost"])
def test_after_the_end_a_party_that_has_other_rows_or_lost_its_folder_makes_all_align_again(
    how: str, name: str, tmp_path: Path
) -> None:
    parties = Parties(tmp_path, SETS)
    parties.align()
    if how == "other rows":
        parties = replace(parties, sets={**SETS, name: (*SETS[name][:-1], "id-9x")})
    else:
        shutil.rmtree(parties.folder_of(name) / "alignment")
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(parties.sets)}


def test_a_party_that_died_before_it_kept_the_rows_makes_only_the_tags_be_compared_again(
    tmp_path: Path,
) -> None:
    parties = Parties(tmp_path, SETS, tap=(record := Recorder()))
    parties.align()
    tags = next(number for number, each in enumerate(record.said) if "common" in each.tensors)
    # One of them is told.
    again = Parties(tmp_path / "again", SETS, tap=Interrupting(tags + 1))
    again.outcomes()
    again.tap = after = Recorder()
    assert {tuple(each.ids) for each in again.align().values()} == {in_common(SETS)}
    assert not [each for each in after.said if "points" in each.tensors]


def test_an_unfinished_alignment_of_an_earlier_release_begins_anew(tmp_path: Path) -> None:
    """It showed its rows in another order, and noted no marks."""
    parties = interrupted(tmp_path)
    before = {name: state(parties, name) for name in SETS}
    for name, facts in before.items():
        old = {key: value for key, value in facts.items() if key not in ("marks", "salt", "sum")}
        total = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
        path = parties.folder_of(name) / "alignment" / "state.json"
        path.write_text(json.dumps({**old, "sum": total}))
    parties.tap = Interrupting(24)
    parties.outcomes()
    assert all(state(parties, name)["secret"] != before[name]["secret"] for name in SETS)
    parties.tap = Recorder()
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(SETS)}


def test_a_secret_that_was_damaged_is_not_used(tmp_path: Path) -> None:
    """The run would end well, and with fewer rows."""
    parties = Parties(tmp_path, SETS, tap=Interrupting(bundles() // 2))
    parties.outcomes()
    state = parties.folder_of("p1") / "alignment" / "state.json"
    facts = json.loads(state.read_text())
    state.write_text(json.dumps(facts | {"secret": facts["secret"][::-1]}))
    parties.tap = Recorder()
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(SETS)}
