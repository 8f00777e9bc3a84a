"""What several processes of a party need: fair shares, encoders that can be shared out, devices by
rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import read_launch, resolve_device
from vfl_party.data import Features
from vfl_party.data.inputs.made import BatchLog
from vfl_party.models import InputSpec
from vfl_party.ranks import SpreadEncoder, check_spread, join_ranks, spread
from vfl_party.ranks.group import (
    RankLost,
    Ranks,
    Word,
    convert_rank_errors,
    divide_rows,
    pack,
    unpack,
)
from vfl_party.ranks.leader import _derive_rank_seed

CPU, SPEC = torch.device("cpu"), InputSpec((6,))


class _Odd(nn.Module):
    """Fails without rows, or has a layer that nothing goes through."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.used, self.spare, self.fails = nn.Linear(6, 4), nn.Linear(6, 4), fails

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.used(x)
        return z - z[0] if self.fails else z


@pytest.mark.parametrize(("rows", "ranks"), [(0, 2), (1, 3), (7, 3), (1024, 8)])
def test_shares_differ_by_one_row_at_most(rows: int, ranks: int) -> None:
    found = divide_rows(rows, ranks)
    assert (sum(found), len(found)) == (rows, ranks)
    assert max(found) - min(found) <= 1
    # Rank 0 has rows where there are any.
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("encoder", "spec"),
    [
        (None, None),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), SPEC),
        (nn.Identity(), SPEC),
        (_Odd(), SPEC),
        (_Odd(fails=True), SPEC),
    ],
)
def test_an_encoder_that_cannot_be_shared_out_is_refused(encoder: Any, spec: Any) -> None:
    with raises(InputError, Code.MODEL_INVALID, names="p1"):
        check_spread(encoder, spec, CPU, "p1")


def test_an_encoder_is_looked_at_without_a_trace() -> None:
    encoder = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    before, state = (
        torch.get_rng_state(),
        {name: each.clone() for name, each in encoder.state_dict().items()},
    )
    check_spread(encoder, SPEC, CPU, "p1")
    assert torch.equal(torch.get_rng_state(), before)
    assert encoder.training
    assert all(each.grad is None for each in encoder.parameters())
    assert all(torch.equal(each, state[name]) for name, each in encoder.state_dict().items())


def test_the_others_dropout_follows_from_rank_0_s_generator_without_a_draw() -> None:
    torch.manual_seed(3)
    first = _derive_rank_seed(CPU)
    assert _derive_rank_seed(CPU) == first
    torch.rand(1)
    assert _derive_rank_seed(CPU) != first
    torch.manual_seed(3)
    assert _derive_rank_seed(CPU) == first


def test_a_connection_that_breaks_ends_the_process_and_not_the_run() -> None:
    said = "[/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer\nmore"
    with raises(RankLost, names=("pair.cc", "third_party")), convert_rank_errors():
        raise RuntimeError(said)
    with raises(RankLost), convert_rank_errors():
        raise dist.DistBackendError("NCCL error")
    # The run fails by it, as by that of one process.
    with pytest.raises(torch.OutOfMemoryError), convert_rank_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")
    # The runner would tell the server that the run has failed.
    assert not issubclass(RankLost, Exception)
    with pytest.raises(InputError), convert_rank_errors():
        check_spread(None, None, CPU, "p1")


def test_under_torchrun_each_process_has_the_gpu_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_launch() == (0, 1, 0)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"NVIDIA H{i}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert read_launch() == (1, 2, 1)
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cpu") == CPU
    with raises(InputError, Code.CONFIG_INVALID):
        resolve_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises(InputError, Code.DEVICE_MISSING):
        resolve_device("cuda")


@pytest.mark.parametrize("changed", [{"RANK": None}, {"WORLD_SIZE": "-3"}, {"RANK": "5"}])
def test_variables_that_torchrun_would_not_set_are_refused(
    changed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in (names | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with raises(InputError, Code.CONFIG_INVALID):
        read_launch()


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield present(dist.group.WORLD)
    dist.destroy_process_group()


def _step(module: nn.Module) -> list[Tensor]:
    """The gradients of one backward pass."""
    module.zero_grad()
    module(torch.ones(3, 6)).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_each_gradient_is_a_message_of_its_own_in_every_step(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a sum's last bits depend on the layout of DistributedDataParallel's buckets, which
    changes once.
    """
    encoder = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    wrapped = spread.make_parallel(encoder, CPU, alone)
    messages: list[torch.Size] = []
    really = dist.reduce

    def noted(tensor: Tensor, **how: Any) -> Any:
        messages.append(tensor.shape)
        return really(tensor, **how)

    monkeypatch.setattr(dist, "reduce", noted)
    want = _step(encoder)
    for _ in range(3):
        messages.clear()
        got = _step(wrapped)
        assert all(map(torch.equal, got, want))
        assert sorted(messages) == sorted(parameter.shape for parameter in encoder.parameters())


def test_a_sum_that_fails_is_no_gradient(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = spread.make_parallel(nn.Linear(6, 4), CPU, alone)

    class Failed:
        def get_future(self) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_exception(
                RuntimeError("/gloo/transport/tcp/pair.cc: Connection reset by peer")
            )
            return future

    monkeypatch.setattr(dist, "reduce", lambda tensor, **how: Failed())
    with raises(RankLost, names="pair.cc"), convert_rank_errors():
        _step(wrapped)


def test_rank_0_tells_positions_and_never_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sends beside weights and gradients is whole numbers: none of the inputs."""
    told: list[tuple[Word, list[Any]]] = []
    floats: list[Tensor] = []

    class Told(Ranks):
        def send_command(self, word: Word, facts: Any = None, arrays: Any = ()) -> None:
            body = pack(facts or {}, arrays)
            told.append((word, unpack(body)[1]))

        def spread(self, module: nn.Module) -> None:
            floats.extend(module.parameters())

        def send(self, parts: Any, to: Any) -> None:
            floats.extend(parts)

        def receive(self, parts: Any, of: Any) -> None:
            for part in parts:
                part.zero_()

    monkeypatch.setattr(spread, "make_parallel", lambda module, device, group: module)
    group: Any = None
    x_NF = torch.arange(60.0).reshape(10, 6)
    features = replace(Features.of(x_NF.numpy()), noted=BatchLog())
    encoder = nn.Linear(6, 4)
    shared = SpreadEncoder(
        Told(0, 2, CPU, group, group, 1.0), encoder, SPEC, "float32", present(features.noted)
    )
    rows = np.array([7, 2, 5], np.int64)
    z_BD = shared(*features.inputs(rows))
    assert torch.equal(z_BD[:2], encoder(x_NF[[7, 2]]))
    z_BD.sum().backward()
    assert [word for word, _ in told] == [Word.ENCODER, Word.FORWARD, Word.BACKWARD]
    arrays = [each for _, arrays in told for each in arrays]
    assert [each.tolist() for each in arrays] == [rows.tolist()]
    # Another process makes inputs of them, and torch warns once of memory that is only read.
    assert all(each.flags.writeable for each in arrays)
    # The weights, and the gradient of the other rank's one row.
    assert [tuple(each.shape) for each in floats] == [(4, 6), (4,), (1, 4)]
    with pytest.raises(TypeError):
        pack({}, [x_NF.numpy()])
    # Made by the phase itself, so no other process could.
    with raises(InputError, Code.CONFIG_INVALID):
        shared(x_NF[:2] + 1)


def test_positions_are_heard_as_torch_can_use_them_without_a_warning() -> None:
    facts, (rows, drawn) = unpack(pack({"a": 1}, [np.arange(3), np.arange(5, dtype=np.uint8)]))
    assert (facts, rows.tolist(), drawn.tolist()) == ({"a": 1}, [0, 1, 2], [0, 1, 2, 3, 4])
    assert rows.flags.writeable
    assert drawn.flags.writeable


def test_inputs_that_a_phase_has_changed_are_of_no_rows() -> None:
    """Rank 0 would compute with them, and the other ranks with the rows as they are."""
    noted = BatchLog()
    x, codes = np.ones((4, 3), np.float32), np.zeros((4, 2), np.int64)
    features = replace(Features.of(x, codes, (5, 5)), noted=noted)
    numbers, categories = features.inputs(np.array([2, 0], np.int64))
    made = present(noted.of((numbers, categories)))
    assert made.rows.tolist() == [2, 0]
    assert noted.of((numbers, categories + 1)) is None
    assert noted.of((numbers,)) is None
    categories[0, 1] = 3
    assert noted.of((numbers, categories)) is None
    numbers, categories = features.inputs(np.array([1], np.int64))
    numbers.mul_(2)
    assert noted.of((numbers, categories)) is None


def test_the_next_word_may_be_long_in_coming(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        word, facts, _ = ranks.receive_command()
        ranks.exchange_facts({"word": word.name, **facts})

    store = str(tmp_path / "store")
    child = _second(store, work)
    try:
        with _one_of_two(store, 0) as ranks:
            # Longer than a step may take.
            time.sleep(1.0)
            ranks.send_command(Word.VIEWS, {"a": 1})
            assert ranks.exchange_facts({})[1] == {"word": "VIEWS", "a": 1}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_is_lost_before_the_other_parties_lose_patience(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait as long as a step may take, and then stop the run for good."""
    asked: list[float] = []

    def new_group(*, backend: str, timeout: timedelta) -> dist.ProcessGroup:
        asked.append(timeout.total_seconds())
        return alone

    monkeypatch.setattr("vfl_party.ranks.group.read_launch", lambda: (0, 2, 0))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **how: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr("vfl_party.ranks.group._end_group", lambda ranks: None)
    with join_ranks(CPU, 8.0) as ranks:
        assert present(ranks).beat_s < min(asked)
    assert asked == [4.0, 4.0]


def test_a_word_that_nobody_takes_ends_the_wait(tmp_path: Path) -> None:
    """A rank has stopped, or a stranger has taken its place with the bytes of a new connection."""
    store = str(tmp_path / "store")
    child = _second(store, lambda ranks: os.kill(os.getpid(), signal.SIGSTOP))
    try:
        with _one_of_two(store, 0) as ranks:
            # More than the system holds for it.
            rows = np.zeros(1 << 21, np.int64)
            with pytest.raises(RankLost), convert_rank_errors():
                ranks.send_command(Word.FORWARD, {}, [rows])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _second(store: str, work: Callable[[Ranks], None]) -> int:
    """Forks a process that is rank 1 of two, and does ``work``; returns its number."""
    if child := os.fork():
        return child
    try:
        with _one_of_two(store, 1) as ranks, contextlib.suppress(RankLost), convert_rank_errors():
            work(ranks)
    finally:
        os._exit(0)


@contextmanager
def _one_of_two(store: str, rank: int) -> Iterator[Ranks]:
    shared = FileStore(store, 2)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=0.8))
    assert isinstance(group, dist.ProcessGroup)
    yield Ranks(rank, 2, CPU, group, group, 0.2)
    dist.destroy_process_group()


def _reads(seconds: float) -> Callable[[Ranks], None]:
    def work(ranks: Ranks) -> None:
        with ranks.at_work():
            if seconds == math.inf:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(seconds)
        ranks.exchange_facts({"rank": ranks.rank})

    return work


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.6, math.inf], ids=["slow", "stopped"])
def test_a_rank_may_read_for_long_and_one_that_is_silent_is_lost(
    seconds: float, tmp_path: Path
) -> None:
    """Both for longer than a step may take, 0.8 s."""
    store = str(tmp_path / "store")
    child = _second(store, _reads(seconds))
    try:
        with _one_of_two(store, 0) as ranks:
            begun_s = time.monotonic()
            if seconds == math.inf:
                with pytest.raises(RankLost), convert_rank_errors(), ranks.at_work():
                    pass
                assert time.monotonic() - begun_s < 10
            else:
                with ranks.at_work():
                    pass
                assert time.monotonic() - begun_s > 0.8
                assert [each["rank"] for each in ranks.exchange_facts({"rank": 0})] == [0, 1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
