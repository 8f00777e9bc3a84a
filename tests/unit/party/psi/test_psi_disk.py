"""Private alignment in more than one batch of tags and more than one part: what is on the disk,
what is taken up again, and what is said of a disk that is full or damaged.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness.aligning import SERVER, Parties, Recorder, in_common, sets_of, small_batches
from tests.harness.errors import assert_names, raises
from vfl_common import psi
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, InterruptedRun
from vfl_common.psi import PHASE, TAG_BYTES
from vfl_common.psi.spill import Spill
from vfl_server import intersection
from vfl_server.intersection import KeptTags, find_holders

BATCH, TAG_BATCH, PARTS = 4, 8, 8
# Three batches of tags, two of p1's and of p2's.
SETS = sets_of(
    [f"id-{number}" for number in range(19)],
    [f"id-{number}" for number in range(2, 17)],
    [f"id-{number}" for number in range(5, 18)],
)
LAST = 3


small = small_batches(BATCH)


@pytest.fixture(scope="module", autouse=True)
def small_tags() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psi, "TAG_BATCH", TAG_BATCH)
        # 47 tags in all.
        patch.setattr(intersection, "_PART_TAGS", PARTS)
        yield


def tags_step(number: int) -> StepKey:
    return StepKey(PHASE, len(SETS), 1 + number)


class Until(Recorder):
    """Raises InterruptedRun instead of sending what ``who`` sends at a step."""

    def __init__(self, who: str, step: StepKey) -> None:
        super().__init__()
        self._at = who, step

    def __call__(self, sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if (sender, step) == self._at:
            raise InterruptedRun("a test asked for it")
        return super().__call__(sender, receiver, step, bundle)

    def tags(self) -> list[int]:
        """The batches of tags that were sent."""
        return sorted({each.step.batch - 1 for each in self.said if "tags" in each.tensors})


def server_files(parties: Parties) -> list[Path]:
    return sorted(parties.folder_of(SERVER).rglob("*"))


def aligns(parties: Parties) -> Until:
    """Aligns to the end, which must be right; returns what was said."""
    parties.tap = said = Until("nobody", tags_step(0))
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(SETS)}
    assert [path.name for path in parties.folder.glob("run/*/alignment/*")] == ["common.bits"] * 3
    assert not server_files(parties)
    return said


def stopped(folder: Path, who: str = SERVER, number: int = LAST - 1) -> Parties:
    """Parties that were interrupted at a batch of tags."""
    parties = Parties(folder, SETS, tap=Until(who, tags_step(number)))
    _, errors = parties.outcomes()
    assert all(isinstance(each, InterruptedRun) for each in errors)
    return parties


@pytest.mark.parametrize("partial", [False, True])
def test_many_batches_and_parts_give_what_one_gives(
    partial: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"partial": True} if partial else {}
    found = Parties(
        tmp_path / "many", SETS, rows=rows, tap=(said := Until("", tags_step(0)))
    ).align()
    assert said.tags() == [*range(LAST)]
    monkeypatch.setattr(psi, "TAG_BATCH", 1 << 20)
    monkeypatch.setattr(intersection, "_PART_TAGS", 1 << 20)
    once = Parties(
        tmp_path / "once", SETS, rows=rows, tap=(said := Until("", tags_step(0)))
    ).align()
    assert said.tags() == [0]
    for name, each in found.items():
        assert (each.ids, each.division) == (once[name].ids, once[name].division)
        assert np.array_equal(each.rows, once[name].rows)


@pytest.mark.parametrize("who", [*SETS, SERVER])
@pytest.mark.parametrize("number", range(LAST))
def test_only_batches_that_the_server_lacks_are_sent_again(
    number: int, who: str, tmp_path: Path
) -> None:
    parties = stopped(tmp_path, who, number)
    # The server has kept the one that it does not answer. The last one is always sent.
    has = number + (who == SERVER)
    assert aligns(parties).tags() == [*range(min(has, LAST - 1), LAST)]


def test_a_server_without_its_folder_is_sent_all_again(tmp_path: Path) -> None:
    parties = stopped(tmp_path)
    shutil.rmtree(parties.folder_of(SERVER) / "alignment")
    assert aligns(parties).tags() == [*range(LAST)]


def test_what_is_kept_of_another_attempt_is_not_used(tmp_path: Path) -> None:
    parties = stopped(tmp_path)
    shutil.rmtree(parties.folder_of("p1") / "alignment")
    said = aligns(parties)
    assert said.tags() == [*range(LAST)]
    assert [each for each in said.said if "points" in each.tensors]


def test_a_half_written_batch_is_written_again(tmp_path: Path) -> None:
    parties = stopped(tmp_path)
    for path in parties.folder_of(SERVER).rglob("*.tags"):
        os.truncate(path, path.stat().st_size - 1)
    aligns(parties)


def test_what_says_what_is_kept_may_be_anything(tmp_path: Path) -> None:
    for number, text in enumerate(("", "{", "[" * 100_000, "[]")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "state.json").write_text(text)
        assert KeptTags(folder, b"attempt", {"p0": 3, "p1": 2}).find_first_batch() == 0


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "0.tags"
    other.write_text("of somebody else")
    link.symlink_to(other)
    with raises(InputError, Code.FILE_INVALID):
        Spill(link, TAG_BYTES, TAG_BATCH, "remove it").write(0, bytes(TAG_BYTES))
    assert other.read_text() == "of somebody else"


def test_only_their_owner_may_read_the_files(tmp_path: Path) -> None:
    parties = stopped(tmp_path)
    files = [path for path in tmp_path.rglob("alignment/*") if path.is_file()]
    assert {path.suffix for path in files} == {".tags", ".points", ".json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    folders = {path.parent for path in files}
    assert len(folders) == 1 + len(SETS)
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    aligns(parties)


# -- comparing


def test_parts_hold_all_tags_and_equal_ones_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intersection, "_PART_TAGS", 20)
    drawn = np.random.default_rng(3).integers(0, 256, (400, TAG_BYTES), np.uint8)
    rows = {"p0": np.arange(0, 250), "p1": np.arange(150, 400), "p2": np.arange(240, 245)}
    sizes = {name: len(each) for name, each in rows.items()}
    kept = KeptTags(tmp_path / "tags", bytes(32), sizes)
    for name, each in rows.items():
        for number, start in enumerate(range(0, len(each), TAG_BATCH)):
            kept.add(number, name, memoryview(drawn[each[start : start + TAG_BATCH]].tobytes()))
    held = {name: np.zeros((len(rows), len(each)), bool) for name, each in rows.items()}
    parts = 0
    for part in kept.parts():
        parts += 1
        found = find_holders({name: found for name, (found, _) in part.items()}, {})
        for name, masks in found.items():
            held[name][:, part[name][1]] = masks
    assert parts == 32
    for name, each in rows.items():
        for other, masks in zip(rows, held[name], strict=True):
            assert np.array_equal(masks, np.isin(each, rows[other])), (name, other)
    assert {path.name for path in (tmp_path / "tags").iterdir()} == {
        "state.json",
        *(f"{number}.tags" for number in range(len(rows))),
    }


# -- a disk that is full or damaged


def first_error(parties: Parties) -> InputError:
    """Aligns in vain. Who has the disk names it; the others end."""
    parties.tap = Recorder()
    found, errors = parties.outcomes()
    assert not found
    assert isinstance(errors[0], InputError)
    assert errors[0].code == Code.FILE_INVALID
    assert "\n" not in str(errors[0])
    return errors[0]


def told(error: InputError) -> None:
    assert_names(str(error), "alignment")


def flip(path: Path, place: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_of_a_party_is_named(tmp_path: Path) -> None:
    parties = stopped(tmp_path, number=0)
    flip(parties.folder_of("p1") / "alignment" / "3.points")
    told(first_error(parties))
    shutil.rmtree(parties.folder_of("p1") / "alignment")
    aligns(parties)


def test_a_damaged_file_of_the_server_is_named(tmp_path: Path) -> None:
    parties = stopped(tmp_path)
    flip(parties.folder_of(SERVER) / "alignment" / "1.tags")
    told(first_error(parties))
    shutil.rmtree(parties.folder_of(SERVER) / "alignment")
    aligns(parties)


def test_a_damaged_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = intersection._PartFile.add

    def damaged(self: intersection._PartFile, *given: object) -> None:
        add(self, *given)  # type: ignore[arg-type]
        flip(self.path)

    parties = Parties(tmp_path, SETS)
    with monkeypatch.context() as patch:
        patch.setattr(intersection._PartFile, "add", damaged)
        error = first_error(parties)
    assert "is damaged. Remove " in str(error)
    aligns(parties)


@pytest.mark.parametrize("who", ["p1", SERVER])
def test_a_full_disk_is_told_in_one_sentence(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, write, pwrite = Parties(tmp_path, SETS), Spill.write, os.pwrite
    # The parties write at the same time, each in its thread.
    disk = threading.local()

    def written(self: Spill, number: int, rows: bytes) -> None:
        disk.full = self.path.is_relative_to(parties.folder_of(who))
        write(self, number, rows)

    def put(file: int, data: bytes, at: int) -> int:
        if disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(Spill, "write", written)
        patch.setattr(os, "pwrite", put)
        error = first_error(parties)
    told(error)
    # It goes on with what it has kept.
    aligns(parties)


def test_a_server_that_can_make_no_folder_says_so(tmp_path: Path) -> None:
    parties = Parties(tmp_path, SETS)
    parties.folder_of(SERVER).parent.mkdir(parents=True)
    parties.folder_of(SERVER).write_text("a file")
    told(first_error(parties))


def test_a_party_whose_file_ends_early_is_told_so(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "1.points", 2, 3, "remove it")
    spill.write(0, b"aabbcc")
    spill.write(1, b"dd")
    assert (spill.count_rows(), spill.read(1, 4)) == (4, b"dd")
    with raises(InputError, Code.FILE_INVALID):
        spill.read(1, 5)
    with raises(InputError, Code.FILE_INVALID):
        Spill(tmp_path / "2.points", 2, 3, "remove it").read(0, 1)
    spill.cut(5)
    assert spill.count_rows() == 3
