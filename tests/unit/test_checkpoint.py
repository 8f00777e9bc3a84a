"""Trees survive a checkpoint exactly; a crash at any point leaves whole checkpoints only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vfl_common.config.models import OptimizerSettings
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.checkpoint import CheckpointStore, pack, unpack
from vfl_party.optim import build_optimizer, build_schedule
from vfl_server.control.membership import newest_common

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
    lambda dtype, shape, seed: torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(200).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
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
    with pytest.raises(InternalError, match="cannot be kept in a checkpoint"):
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
    store.save("1", {name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()})
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
    assert store.labels() == ["000009.b", "000001.a", "000005.splitnn.12"]  # the newest, and two older ones
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
    with pytest.raises(InputError, match=r"no checkpoint x; complete ones: a, b, c"):
        store.discard_after("x")


def test_one_that_was_loaded_stays_until_a_newer_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save("a", 1)
    assert store.load("a") == 1
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        with pytest.raises(InputError, match="cannot write a checkpoint"):
            store.save("b", 2)
    assert store.labels() == ["a"]
    store.save("b", 2)
    assert store.labels() == ["a", "b"]
    store.save("c", 3)
    assert store.labels() == ["b", "c"]


class Crash(BaseException):
    """The process dies here: nothing of ours may catch it."""


def test_a_crash_at_any_call_leaves_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert [again.load(label)["x"][0] for label in labels] == ["_abcd".index(label) for label in labels]
        again.save("e", 5)
        assert not list(folder.glob(".tmp-*"))
        assert again.labels() == [*labels[-2:], "e"]
        assert len(list(folder.iterdir())) == 3
        if not died:
            break
    assert at >= 4  # file and folder made durable, renamed in, an older one removed


def _dies(act: Callable[[], None], patch: pytest.MonkeyPatch, at: int) -> bool:
    """Whether ``act`` came to its call number ``at`` that changes the disk, which dies before it does anything."""
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


def test_a_truncated_or_missing_file_is_not_listed_and_goes_with_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for label in "ab":
        store.save(label, {"x": torch.ones(9), "y": [1, 2]})
    path = next(tmp_path.glob("*-b.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert store.labels() == ["a"]
    path.unlink()
    assert store.labels() == ["a"]
    with pytest.raises(InputError, match="no checkpoint b; complete ones: a") as caught:
        store.load("b")
    assert caught.value.code is Code.CHECKPOINT_INVALID
    store.save("c", 3)
    assert store.labels() == ["a", "c"]
    assert len(list(tmp_path.iterdir())) == 2


@contextlib.contextmanager
def held(store: CheckpointStore, folder: Path, label: str) -> Iterator[None]:
    """The store's thread stops while it saves ``label``: the file is written, but has no name yet."""
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
        lambda store: store.load("a"),
        lambda store: store.discard_after("a"),
        lambda store: store.flush(),
    ],
    ids=["save_later", "save", "labels", "load", "discard_after", "flush"],
)
def test_an_error_of_a_later_save_is_raised_once_by_the_next_call(
    act: Callable[[CheckpointStore], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse)
        store.save_later("b", 2)
        with pytest.raises(InputError, match="cannot write a checkpoint") as caught:
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
    """The second party is in the round of the first one's newest label or, ``behind`` = 1, in the one before."""
    folders = tmp_path / "first", tmp_path / "second"
    for newest in range(2, 7):
        stores = [CheckpointStore(folder / str(newest), keep=2) for folder in folders]
        last = newest, newest - behind
        for store, end in zip(stores, last, strict=True):
            for number in range(1, end):
                store.save_later(f"{number:06d}.a.{number}", number)
        with contextlib.ExitStack() as stack:
            for store, folder, number, stays in zip(stores, folders, last, (first_held, second_held), strict=True):
                label = f"{number:06d}.a.{number}"
                if stays:
                    stack.enter_context(held(store, folder / str(newest), label))
                else:
                    store.save(label, number)
            found = [CheckpointStore(folder / str(newest), keep=2).labels() for folder in folders]  # after a restart
        want = min(number - stays for number, stays in zip(last, (first_held, second_held), strict=True))
        assert newest_common(found) == (f"{want:06d}.a.{want}" if want else None)


@pytest.mark.parametrize(("old", "new"), [(b"\x3f", b"\x3e"), (b"17", b"18")])
def test_a_changed_byte_is_found_at_loading(old: bytes, new: bytes, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save("a", {"x": torch.ones(9), "epoch": 1717171717})
    path = next(tmp_path.glob("*-a.safetensors"))
    at = path.read_bytes().rindex(old)
    path.write_bytes(path.read_bytes()[:at] + new + path.read_bytes()[at + len(old) :])
    assert store.labels() == ["a"]
    with pytest.raises(InputError, match="the checkpoint is damaged") as caught:
        store.load("a")
    assert caught.value.code is Code.CHECKPOINT_INVALID


@pytest.mark.parametrize("label", ["", "../up", "a/b", "a b"])
def test_a_label_cannot_leave_the_folder(label: str, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="label"):
        CheckpointStore(tmp_path, keep=1).save(label, 1)


def test_a_store_keeps_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        CheckpointStore(tmp_path, keep=0)


def _refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")
