"""From which labels a party need not go back, and which answers of the server it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.errors import raises
from tests.unit.party.runtime.test_saving import Store, runner
from vfl_common.errors import Code, PeerError
from vfl_common.rpc.messages import Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import MAX_OFFERED, Planned, ahead, alone_after, list_earlier_labels

PLAN = [
    Planned("train", 2, None),
    Planned("one", 3, 0),
    Planned("two", 4, 0),
    Planned("end", 1, None),
]
SENDS = [Planned("local", 3, 0), Planned("head", 2, 1, (0,)), Planned("more", 2, None, (0, 1))]
ONCE = [Planned("local", 3, 0), Planned("head", 4, 1), Planned("more", 2, 0)]


@pytest.mark.parametrize(
    ("label", "want"),
    [
        ("000001.train.1", []),
        ("000002.train.2", []),
        ("000003.one.1", ["000002.train.2"]),
        ("000005.one.3", ["000004.one.2", "000003.one.1", "000002.train.2"]),
        ("000006.two.1", ["000005.one.3", "000004.one.2", "000003.one.1", "000002.train.2"]),
        ("000010.end.1", []),
        ("000003.other.1", []),
    ],
)
def test_a_party_that_was_alone_offers_the_rounds_that_it_has_done(
    label: str, want: list[str]
) -> None:
    assert list_earlier_labels(label, PLAN) == want


def test_alone_from_the_beginning() -> None:
    assert list_earlier_labels("000002.one.2", PLAN[1:]) == ["000001.one.1", ""]
    assert (
        len(list_earlier_labels("100000.one.100000", [Planned("one", 100_000, 0)])) == MAX_OFFERED
    )


def test_alone_from_the_second_round_on() -> None:
    assert list_earlier_labels("000007.head.4", ONCE) == [
        "000006.head.3",
        "000005.head.2",
        "000004.head.1",
    ]
    assert list_earlier_labels("000004.head.1", ONCE) == []
    assert list_earlier_labels("000008.more.1", ONCE)[-2:] == ["000005.head.2", "000004.head.1"]


@pytest.mark.parametrize(
    ("label", "plan", "want"),
    [
        ("000004.head.1", ONCE, True),
        ("000009.more.2", ONCE, True),
        ("000003.local.3", ONCE, False),
        ("", ONCE, False),
        ("", ONCE[:1], True),
        ("000009.two.4", PLAN, False),
        ("", [], False),
    ],
)
def test_whether_the_others_are_needed(label: str, plan: list[Planned], want: bool) -> None:
    assert alone_after(label, plan) is want


@pytest.mark.parametrize(
    ("label", "want"),
    [
        ("000002.local.2", []),
        ("000003.local.3", ["000004.head.1"]),
        # It ended early.
        ("000003.local.1", ["000004.head.1"]),
        ("000004.head.1", []),
        ("000005.head.2", ["000006.more.1", "000007.more.2"]),
        ("000007.more.2", []),
    ],
)
def test_a_party_that_is_behind_skips_what_would_leave_it_as_it_was(
    label: str, want: list[str]
) -> None:
    assert ahead(label, SENDS) == want
    assert ahead(label, ONCE) == []


LENIENT = [
    Planned("local", 2, None),
    Planned("train", 3, None, lenient=True),
    Planned("end", 1, None),
]
STRICT = [Planned("local", 2, None), Planned("train", 3, None), Planned("end", 1, None)]


@pytest.mark.parametrize(
    ("role", "plan", "own", "facts", "fits"),
    [
        ("passive", LENIENT, "000003.train.1", {"data": "d"}, True),
        ("passive", LENIENT, "000002.local.2", {"data": "d"}, True),
        # Died before the others heard that it is over.
        ("passive", LENIENT, "000005.train.3", {"data": "d"}, True),
        # The others wait for it.
        ("passive", LENIENT, "000001.local.1", {"data": "d"}, False),
        ("passive", LENIENT, "000006.end.1", {"data": "d"}, False),
        # It has not yet been in a generation.
        ("passive", LENIENT, "000003.train.1", {}, False),
        # A fresh start.
        ("passive", LENIENT, "", None, False),
        ("passive", STRICT, "000003.train.1", {"data": "d"}, False),
        ("active", LENIENT, "000003.train.1", {"data": "d"}, False),
    ],
)
def test_a_party_returns_only_where_the_others_may_have_gone_on(
    role: str,
    plan: list[Planned],
    own: str,
    facts: dict[str, str] | None,
    fits: bool,
    tmp_path: Path,
) -> None:
    folder = None
    if facts is not None:
        store = Store([], "")
        store.save(own, None)
        folder = RunFolder(tmp_path, "run", store)
        folder.note(run_id="run", **facts)
    made, _ = runner(tmp_path, [], [], role=role, plan=plan, resume=folder)
    start = Start("run", 1, "", "", returning=True)
    if fits:
        made._check(start, made._make_offer(folder), folder)
        return
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1", party="server"):
        made._check(start, made._make_offer(folder), folder)


@pytest.mark.parametrize(
    ("in_process", "saved", "anew", "fits"),
    [
        (True, 1, "", False),
        (True, 0, "", False),
        (False, 1, "", False),
        # Nothing is lost with it.
        (False, 0, "", True),
        (False, 1, "a new run was asked for", True),
        (True, 1, "a new run was asked for", True),
    ],
)
def test_a_party_leaves_its_run_only_if_the_server_says_why(
    in_process: bool, saved: int, anew: str, fits: bool, tmp_path: Path
) -> None:
    store = Store([], "")
    for _ in range(saved):
        store.save("000001.a.1", None)
    folder = RunFolder(tmp_path, "old", store)
    folder.note(run_id="old")
    made, _ = runner(tmp_path, [], [], resume=None if in_process else folder)
    start = Start("new", 1, "", "", anew=anew)
    if not fits:
        with raises(PeerError, Code.MALFORMED_MESSAGE, names=("--fresh", "p1")):
            made._check(start, made._make_offer(folder), folder)
        return
    made._check(start, made._make_offer(folder), folder)
    made._leave_run(folder, start)
    assert folder.set_aside_reason == anew


def test_what_a_party_holds_is_told_apart_from_what_it_may_skip_to(tmp_path: Path) -> None:
    plan, store = (
        [Planned("upload", 1, None, (0,)), Planned("train", 4, None, lenient=True)],
        Store([], ""),
    )
    folder = RunFolder(tmp_path, "run", store)
    made, _ = runner(tmp_path, [], [], plan=plan, resume=folder)
    # It was killed before its first checkpoint.
    first = made._make_offer(folder)
    assert first.held == ("000001.upload.1", "")
    assert set(first.checkpoints) == {
        "",
        "000001.upload.1",
        *(f"{n:06d}.train.{n - 1}" for n in range(2, 6)),
    }
    for label in ("000001.upload.1", "000002.train.1", "000003.train.2"):
        store.save(label, None)
    later = made._make_offer(folder)
    assert later.held == ("000001.upload.1", "000002.train.1", "000003.train.2")
    assert set(later.checkpoints) == {*later.held, "000004.train.3", "000005.train.4"}
