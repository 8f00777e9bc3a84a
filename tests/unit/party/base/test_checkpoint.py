"""Trees survive a checkpoint exactly; a crash at any point leaves whole checkpoints only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.harness.errors import assert_names, raises
from vfl_common.config.models import OptimizerSettings
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base import checkpoint
from vfl_party.base.checkpoint import CheckpointStore, pack, unpack
from vfl_party.models.training import build_optimizer, build_schedule
from vfl_server.control.membership import find_newest_common

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]

tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(200).to(dtype)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
)
keys = scalars | st.tuples(st.integers(), st.text(max_size=3))
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tensor", "tuple", "dict"]), inner, max_size=1)
    ),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(k) is type(m) for k, m in zip(a, b, strict=True))
            and all(equal(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(trees)
@settings(max_examples=80)
def test_any_tree_survives_safetensors_and_json(tree: Any) -> None:
    packed, jsonable = pack(tree)
    data, text = safetensors.torch.save(packed), json.dumps(jsonable)
    assert equal(unpack(safetensors.torch.load(data), json.loads(text)), tree)


@given(trees)
@settings(max_examples=80)
def test_a_file_is_what_safetensors_writes_with_the_hash_of_the_rest_in_its_header(
    tree: Any,
) -> None:
    packed, jsonable = pack(tree)
    about = json.dumps({"label": "a", "tree": jsonable})
    without = safetensors.torch.save(packed, {"vfl": about})
    expected = safetensors.torch.save(
        packed, {"vfl": about, "sha256": hashlib.sha256(without).hexdigest()}
    )
    written = b"".join(checkpoint._add_sha256(checkpoint._serialise(packed, about)))
    assert header_and_rest(written) == header_and_rest(expected)


def header_and_rest(file: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(file[:8], "little")
    # As safetensors aligns what follows.
    assert end % 8 == 0
    return json.loads(file[8:end]), file[end:]


def test_tensors_are_copies_that_share_nothing_and_may_be_changed(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    tree = {"a": x, "same": x, "row": x[0], "turned": x.T}
    store = CheckpointStore(tmp_path, keep=1)
    store.save("1", tree)
    back = store.load("1")
    assert torch.equal(back["turned"], x.T)
    back["a"].zero_()
    assert torch.equal(back["same"], x)
    assert x.sum() == 15


@pytest.mark.parametrize("node", [object(), {1, 2}, b"bytes", {"deep": [nn.Linear(1, 1)]}])
def test_what_cannot_be_kept_is_refused(node: Any) -> None:
    with raises(InternalError, Code.INTERNAL):
        pack(node)


def test_a_training_state_goes_on_where_it_stopped(tmp_path: Path) -> None:
    chosen = OptimizerSettings(schedule="cosine")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = build_optimizer(chosen, model.parameters())
    schedule = build_schedule(chosen, optimizer, 5)

    def epoch() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 4) * torch.rand(4, 1)).square().sum().backward()
        optimizer.step()
        schedule.step()

    epoch()
    store = CheckpointStore(tmp_path, keep=1)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    store.save(
        "1",
        {name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()},
    )
    epoch()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    tree = store.load("1")
    for name, part in parts.items():
        part.load_state_dict(tree[name])
    torch.set_rng_state(tree["rng"])
    epoch()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_the_newest_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for label in ("000010.c", "000009.b", "000001.a", "000005.splitnn.12"):
        store.save(label, {"label": label})
        os.utime(next(tmp_path.glob(f"*{label}.safetensors")), (0, 0))
    # The newest, and two older ones.
    assert store.labels() == ["000009.b", "000001.a", "000005.splitnn.12"]
    assert CheckpointStore(tmp_path, keep=2).load("000001.a") == {"label": "000001.a"}
    assert len(list(tmp_path.iterdir())) == 3


def test_order_is_that_of_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    store.save("old", 1)
    next(tmp_path.iterdir()).rename(tmp_path / "999999-old.safetensors")
    store.save("new", 2)
    store.save("newer", 3)
    assert store.labels() == ["old", "new", "newer"]


def test_a_label_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for value, label in enumerate(["a", "b", "a"]):
        store.save(label, value)
    assert store.labels() == ["b", "a"]
    assert store.load("a") == 2


def test_what_is_newer_is_discarded_after_a_rollback(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for label in "abcd":
        store.save(label, label)
    store.discard_after("b")
    assert store.labels() == ["a", "b"]
    store.save("c", "again")
    assert store.labels() == ["a", "b", "c"]
    assert store.load("c") == "again"
    with raises(InputError, Code.CHECKPOINT_INVALID):
        store.discard_after("x")


def test_one_that_was_loaded_stays_until_a_newer_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save("a", 1)
    assert store.load("a") == 1
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        with raises(InputError, Code.CHECKPOINT_INVALID):
            store.save("b", 2)
    assert store.labels() == ["a"]
    store.save("b", 2)
    assert store.labels() == ["a", "b"]
    store.save("c", 3)
    assert store.labels() == ["b", "c"]


class Crash(BaseException):
    """The process dies here: nothing of ours may catch it."""


def test_a_crash_at_any_call_leaves_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in itertools.count():
        folder = tmp_path / str(at)
        store = CheckpointStore(folder, keep=2)
        store.save("a", {"x": 1 * torch.ones(3)})
        store.save("b", {"x": 2 * torch.ones(3)})
        store.save("c", {"x": 3 * torch.ones(3)})
        with monkeypatch.context() as patch:
            died = _dies(lambda store=store: store.save("d", {"x": 4 * torch.ones(3)}), patch, at)  # type: ignore[misc]
        again = CheckpointStore(folder, keep=2)
        labels = again.labels()
        assert labels in (["a", "b", "c"], ["b", "c"], ["b", "c", "d"])
        assert [again.load(label)["x"][0] for label in labels] == [
            "_abcd".index(label) for label in labels
        ]
        again.save("e", 5)
        assert not list(folder.glob(".tmp-*"))
        assert again.labels() == [*labels[-2:], "e"]
        assert len(list(folder.iterdir())) == 3
        if not died:
            break
    # File and folder made durable, renamed in, an older one removed.
    assert at >= 4


def _dies(act: Callable[[], None], patch: pytest.MonkeyPatch, at: int) -> bool:
    """Whether ``act`` came to its call number ``at`` that changes the disk, which dies before it
    does anything.
    """
    left = at

    def dying(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return call(*args, **kwargs)

        return wrapped

    for owner, name in [(os, "fsync"), (Path, "rename"), (Path, "unlink")]:
        patch.setattr(owner, name, dying(getattr(owner, name)))
    try:
        act()
    except Crash:
        return True
    return False


def test_a_truncated_or_missing_file_is_not_listed_and_goes_with_the_next_save(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for label in "ab":
        store.save(label, {"x": torch.ones(9), "y": [1, 2]})
    path = next(tmp_path.glob("*-b.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert store.labels() == ["a"]
    path.unlink()
    assert store.labels() == ["a"]
    with raises(InputError, Code.CHECKPOINT_INVALID):
        store.load("b")
    store.save("c", 3)
    assert store.labels() == ["a", "c"]
    assert len(list(tmp_path.iterdir())) == 2


@contextlib.contextmanager
def held(store: CheckpointStore, folder: Path, label: str) -> Iterator[None]:
    """The store's thread stops while it saves ``label``: the file is written, but has no name
    yet.
    """
    reached, released = threading.Event(), threading.Event()
    rename = Path.rename

    def holding(path: Path, target: Path) -> Path:
        if path.parent == folder and path.stem.endswith(f"-{label}"):
            reached.set()
            assert released.wait(60)
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", holding)
        store.save_later(label, {"label": label})
        try:
            assert reached.wait(60)
            yield
        finally:
            released.set()
            store.flush()


def test_a_later_save_copies_at_once_and_writes_in_its_own_time(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    x, metrics = torch.ones(3), {"loss": 1.0}
    with held(store, tmp_path, "a"):
        assert CheckpointStore(tmp_path, keep=2).labels() == []
    with held(store, tmp_path, "b"):
        pass
    store.save_later("c", {"x": x, "metrics": metrics})
    x.zero_()
    metrics["loss"] = 0.0
    assert store.labels() == ["a", "b", "c"]
    assert equal(store.load("c"), {"x": torch.ones(3), "metrics": {"loss": 1.0}})


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.save_later("c", 3),
        lambda store: store.save("c", 3),
        lambda store: store.labels(),
        lambda store: store.whole(),
        lambda store: store.load("a"),
        lambda store: store.discard_after("a"),
        lambda store: store.flush(),
    ],
    ids=["save_later", "save", "labels", "whole", "load", "discard_after", "flush"],
)
def test_an_error_of_a_later_save_is_raised_once_by_the_next_call(
    act: Callable[[CheckpointStore], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        store.save_later("b", 2)
        with raises(InputError, Code.CHECKPOINT_INVALID) as caught:
            act(store)
    assert caught.value.code is Code.CHECKPOINT_INVALID
    assert store.labels() == ["a"]
    store.save("c", 3)
    assert store.labels() == ["a", "c"]


@pytest.mark.parametrize("first_held", [False, True])
@pytest.mark.parametrize("second_held", [False, True])
@pytest.mark.parametrize("behind", [0, 1])
def test_two_parties_share_a_label_whenever_one_of_them_is_killed(
    behind: int, first_held: bool, second_held: bool, tmp_path: Path
) -> None:
    """The second party is in the round of the first one's newest label or, ``behind`` = 1, in the
    one before.
    """
    folders = tmp_path / "first", tmp_path / "second"
    for newest in range(2, 7):
        stores = [CheckpointStore(folder / str(newest), keep=2) for folder in folders]
        last = newest, newest - behind
        for store, end in zip(stores, last, strict=True):
            for number in range(1, end):
                store.save_later(f"{number:06d}.a.{number}", number)
        with contextlib.ExitStack() as stack:
            for store, folder, number, stays in zip(
                stores, folders, last, (first_held, second_held), strict=True
            ):
                label = f"{number:06d}.a.{number}"
                if stays:
                    stack.enter_context(held(store, folder / str(newest), label))
                else:
                    store.save(label, number)
            # After a restart.
            found = [CheckpointStore(folder / str(newest), keep=2).labels() for folder in folders]
        want = min(
            number - stays for number, stays in zip(last, (first_held, second_held), strict=True)
        )
        assert find_newest_common(found) == (f"{want:06d}.a.{want}" if want else None)


@pytest.mark.parametrize(("old", "new"), [(b"\x3f", b"\x3e"), (b"17", b"18")])
def test_a_changed_byte_is_found_at_loading(old: bytes, new: bytes, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save("a", {"x": torch.ones(9), "epoch": 1717171717})
    path = next(tmp_path.glob("*-a.safetensors"))
    at = path.read_bytes().rindex(old)
    path.write_bytes(path.read_bytes()[:at] + new + path.read_bytes()[at + len(old) :])
    assert store.labels() == ["a"]
    with raises(InputError, Code.CHECKPOINT_INVALID, names=("a.safetensors", "000001")):
        store.load("a")


def damage(folder: Path, label: str) -> Path:
    """Flips a bit of the last tensor of a checkpoint, whose header stays as it is."""
    (path,) = folder.glob(f"*-{label}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def tree_of(label: str) -> dict[str, Any]:
    return {"x": torch.full((9,), float(ord(label))), "label": label}


def filled(folder: Path, labels: str) -> CheckpointStore:
    """A store of a process that was started again: it has written none of its checkpoints."""
    store = CheckpointStore(folder, keep=2)
    for label in labels:
        store.save(label, tree_of(label))
    return CheckpointStore(folder, keep=2)


def names(folder: Path, prefix: str = "") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, "abc")
    path = damage(tmp_path, "c")
    data = path.read_bytes()
    # By the header alone.
    assert store.labels() == ["a", "b", "c"]
    assert store.whole() == ["a", "b"]
    assert store.labels() == ["a", "b"]
    assert (tmp_path / f"damaged-{path.name}").read_bytes() == data
    (warning,) = caplog.records
    assert str(path) in warning.getMessage()
    assert_names(warning.getMessage(), "c.safetensors", "000003")
    assert store.whole() == ["a", "b"]
    assert len(caplog.records) == 1
    assert equal(store.load("b"), tree_of("b"))
    store.save("c", tree_of("c"))
    assert CheckpointStore(tmp_path, keep=2).whole() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda _: b"",
        lambda _: b"garbage" * 9,
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" * 8 + data[8:],
    ],
    ids=["empty", "garbage", "a byte is missing", "half is missing", "absurd header"],
)
def test_any_damage_is_found(harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    (path,) = tmp_path.glob("*-b.safetensors")
    path.write_bytes(harm(path.read_bytes()))
    assert store.whole() == ["a"]
    assert names(tmp_path, "damaged-") == [f"damaged-{path.name}"]


@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_is_found_wherever_it_is(bit: int, tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    (path,) = tmp_path.glob("*-b.safetensors")
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        assert store.whole() == ["a"], at
        assert not path.exists()


def test_the_older_file_of_a_label_serves_if_the_newer_one_is_damaged(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    newer = tmp_path / "000009-a.safetensors"
    newer.write_bytes(next(tmp_path.glob("*-a.safetensors")).read_bytes())
    damage(tmp_path, "b")
    newer.write_bytes(newer.read_bytes()[:-1] + b"\0")
    assert store.whole() == ["a"]
    assert equal(store.load("a"), tree_of("a"))


def test_a_few_damaged_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for label in "abcdef":
        store.save(label, tree_of(label))
    for label in "bcdef":
        damage(tmp_path, label)
    assert store.whole() == ["a"]
    assert names(tmp_path, "damaged-") == [
        f"damaged-00000{at}-{label}.safetensors" for at, label in enumerate("def", 4)
    ]


@pytest.mark.parametrize("left", ["", "a"], ids=["all", "all but one"])
def test_many_damaged_ones_at_once_still_count_as_written(tmp_path: Path, left: str) -> None:
    """So a party that has lost them cannot have the others begin again, and the newest damaged ones
    are those kept.
    """
    store = CheckpointStore(tmp_path, keep=9)
    for label in "abcdef":
        store.save(label, tree_of(label))
    for label in "abcdef".removeprefix(left):
        damage(tmp_path, label)
    assert store.whole() == [*left]
    assert store.count_saved() == 6
    assert CheckpointStore(tmp_path, keep=9).count_saved() == 6
    store.save("g", tree_of("g"))
    assert store.count_saved() == 7
    damage(tmp_path, "g")
    assert store.whole() == [*left]
    assert names(tmp_path, "damaged-") == [
        f"damaged-00000{at}-{label}.safetensors" for at, label in enumerate("efg", 5)
    ]
    # All begin again, and may lose their first checkpoints as at any beginning.
    store.discard_after("")
    assert store.count_saved() == 0
    store.save("a", tree_of("a"))
    assert names(tmp_path, "") == ["000001-a.safetensors"]


def test_what_was_verified_or_written_here_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = filled(tmp_path, "ab"), []
    real = checkpoint._read

    def noting(path: Path) -> Any:
        read.append(path.stem[-1])
        return real(path)

    monkeypatch.setattr(checkpoint, "_read", noting)
    assert store.whole() == ["a", "b"]
    assert read == ["a", "b"]
    store.save("c", tree_of("c"))
    assert store.whole() == ["a", "b", "c"]
    assert read == ["a", "b"]
    path = damage(tmp_path, "c")
    # Whatever the clock's resolution: it was written at another time.
    os.utime(path, ns=(0, 0))
    assert store.whole() == ["a", "b"]
    assert read == ["a", "b", "c"]


def test_one_that_cannot_be_read_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a file descriptor left must not rename what is whole."""
    store = filled(tmp_path, "ab")

    def no_descriptor(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", no_descriptor)
        with raises(
            InputError, Code.CHECKPOINT_INVALID, names=("a.safetensors", "000001")
        ) as refused:
            store.whole()
    assert refused.value.code is Code.CHECKPOINT_INVALID
    assert store.whole() == ["a", "b"]


def test_what_is_discarded_lies_aside_until_the_next_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, "abc")
    data = next(tmp_path.glob("*-c.safetensors")).read_bytes()
    store.discard_after("a")
    aside = ["aside-000002-b.safetensors", "aside-000003-c.safetensors"]
    assert names(tmp_path) == ["000001-a.safetensors", *aside]
    assert (tmp_path / aside[1]).read_bytes() == data
    again = CheckpointStore(tmp_path, keep=2)
    assert again.labels() == again.whole() == ["a"]
    # Nothing is newer.
    again.discard_after("a")
    assert names(tmp_path, "aside-") == aside
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        with raises(InputError, Code.CHECKPOINT_INVALID):
            again.save("d", tree_of("d"))
    assert names(tmp_path, "aside-") == aside
    again.save("d", tree_of("d"))
    assert names(tmp_path) == ["000001-a.safetensors", "000002-d.safetensors"]


def test_a_checkpoint_is_written_though_somebody_removes_what_lies_aside_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, "abc")
    store.discard_after("a")
    aside = list(tmp_path.glob("aside-*"))
    assert len(aside) == 2

    def tidy_up(_: Path) -> None:
        for path in aside:
            path.unlink()

    monkeypatch.setattr(checkpoint, "fsync_folder", tidy_up)
    store.save("d", tree_of("d"))
    assert store.labels() == ["a", "d"]


def test_what_is_discarded_replaces_what_lies_aside(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    store.discard_after("b")
    store.discard_after("")
    assert names(tmp_path) == ["aside-000001-a.safetensors", "aside-000002-b.safetensors"]


def test_a_crash_while_they_are_set_aside_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at in range(3):
        store = filled(tmp_path / str(at), "abc")
        with monkeypatch.context() as patch:
            assert _dies(lambda store=store: store.discard_after("a"), patch, at) is (at < 2)  # type: ignore[misc]
        found.append(CheckpointStore(tmp_path / str(at), keep=2).whole())
    assert found == [["a", "b", "c"], ["a", "b"], ["a"]]


def test_a_folder_in_a_checkpoints_place_is_ignored(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc")
    path = next(tmp_path.glob("*-c.safetensors"))
    path.unlink()
    path.mkdir()
    assert store.labels() == store.whole() == ["a", "b"]
    with raises(InputError, Code.CHECKPOINT_INVALID):
        store.load("c")
    store.discard_after("a")
    store.save("b", tree_of("b"))
    # It cannot have the folder's name.
    store.save("c", tree_of("c"))
    assert store.whole() == ["a", "b", "c"]
    assert path.is_dir()


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), IsADirectoryError(21, "Is")]
)
@pytest.mark.parametrize(
    ("act", "calls"),
    [
        (lambda store: store.discard_after("a"), ["rename"]),
        (lambda store: store.save("d", tree_of("d")), ["unlink", "rename"]),
        (lambda store: store.labels(), ["iterdir", "is_file"]),
        (lambda store: store.save_later("d", 4), ["iterdir"]),
    ],
    ids=["discard_after", "save", "labels", "save_later"],
)
def test_an_error_of_the_system_is_one_sentence(
    act: Callable[[CheckpointStore], object],
    calls: list[str],
    error: OSError,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = filled(tmp_path, "abc")

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(Path, call, refuse)
            with pytest.raises(InputError) as raised:
                act(store)
        assert raised.value.code is Code.CHECKPOINT_INVALID
        assert str(raised.value).startswith(f"{tmp_path}: ")
        assert f"({error.strerror})" in str(raised.value)


@pytest.mark.parametrize("label", ["", "../up", "a/b", "a b"])
def test_a_label_cannot_leave_the_folder(label: str, tmp_path: Path) -> None:
    with raises(InternalError, Code.INTERNAL):
        CheckpointStore(tmp_path, keep=1).save(label, 1)


def test_a_store_keeps_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        CheckpointStore(tmp_path, keep=0)


def _refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_labels_are_read_without_torch_which_opens_a_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another process removes meanwhile is then no OSError."""
    store = CheckpointStore(tmp_path, keep=2)
    store.save("000001.a.1", {"w": torch.zeros(3)})
    monkeypatch.setattr(
        torch.UntypedStorage, "from_file", Mock(side_effect=RuntimeError("unable to open file"))
    )
    assert CheckpointStore(tmp_path, keep=2).labels() == ["000001.a.1"]
