"""Devices that are there, and the sentence for those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import (
    get_device_name,
    get_peak_memory,
    get_random_states,
    plain_arithmetic,
    resolve_device,
    set_random_states,
    set_threads,
)
from vfl_party.base.turns import isolate_torch


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"NVIDIA H{i}")


def test_devices_by_their_names(two_gpus: None) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("text", ["cuda:2", "cuda:", "cuda:-1", "tpu", "", "cpu:0"])
def test_a_missing_device_lists_those_there_are(text: str, two_gpus: None) -> None:
    with raises(InputError, Code.DEVICE_MISSING) as caught:
        resolve_device(text)
    assert "NVIDIA" not in caught.value.public


def test_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(InputError, Code.DEVICE_MISSING):
        resolve_device("cuda:1")


def test_a_gpu_has_its_maker_s_name_and_the_memory_of_this_process(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H{device.index}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + device.index)
    assert get_device_name(torch.device("cuda:1")) == "NVIDIA H1"
    assert get_peak_memory(torch.device("cuda:1")) == 1001


def test_convolutions_are_summed_in_one_order_and_torch_is_given_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BACKENDS.cudnn, "deterministic", False)
    monkeypatch.setattr(BACKENDS.cudnn, "benchmark", True)
    back = plain_arithmetic()
    assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (True, False)
    back()
    assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (False, True)


def test_a_gpu_has_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parties of one process take turns with it, and dropout draws from it."""
    states = {0: torch.tensor([7]), 1: torch.tensor([8])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device.index])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({device.index: state})
    )
    here, gpu = torch.device("cpu"), torch.device("cuda:1")
    kept = get_random_states(gpu)
    assert get_random_states(here).keys() == {"cpu"}
    torch.rand(3)
    states[1] = torch.tensor([9])
    set_random_states(kept, gpu)
    assert torch.equal(torch.get_rng_state(), kept["cpu"])
    assert states == {0: torch.tensor([7]), 1: torch.tensor([8])}
    # A checkpoint of a CPU, continued on a GPU.
    set_random_states(get_random_states(here), gpu)
    assert states[1].item() == 8


def test_a_processor_has_a_name_and_no_peak() -> None:
    assert get_device_name(torch.device("cpu"))
    assert get_peak_memory(torch.device("cpu")) is None


def test_threads_may_be_set_again() -> None:
    before = torch.get_num_threads()
    for n in (2, 1):
        set_threads(n)
        assert torch.get_num_threads() == n
    torch.set_num_threads(before)


BACKENDS: Any = torch.backends


def precisions() -> dict[str, object]:
    """How torch multiplies float32, in the words of both of its interfaces."""
    found: dict[str, object] = {}
    flags: dict[str, Callable[[], object]] = {
        "cudnn": lambda: BACKENDS.cudnn.allow_tf32,
        "cublas": lambda: BACKENDS.cuda.matmul.allow_tf32,
        "matmul": torch.get_float32_matmul_precision,
    }
    for name, read in flags.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "set apart"
    for name in (
        "cudnn.conv",
        "cudnn.rnn",
        "cuda.matmul",
        "mkldnn.conv",
        "mkldnn.rnn",
        "mkldnn.matmul",
    ):
        backend, _, operation = name.partition(".")
        found[name] = getattr(getattr(BACKENDS, backend), operation).fp32_precision
    return found


@pytest.fixture
def as_torch_has_it() -> Iterator[None]:
    before, back = BACKENDS.fp32_precision, plain_arithmetic()
    back()
    yield
    BACKENDS.fp32_precision = before
    back()


STATES: dict[str, Callable[[], None]] = {
    "as torch has it": lambda: None,
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32 for all": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "cudnn without it": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
}


@pytest.mark.parametrize("state", list(STATES))
def test_float32_is_float32_and_torch_is_given_back_as_it_was(
    state: str, as_torch_has_it: None
) -> None:
    STATES[state]()
    before = precisions()
    with isolate_torch(1, []):
        during = precisions()
    assert {during.pop(name) for name in ("cudnn", "cublas")} == {False}
    assert during.pop("matmul") == "highest"
    assert set(during.values()) == {"ieee"}
    assert precisions() == before


def test_operations_that_somebody_has_set_apart_are_given_back_too(as_torch_has_it: None) -> None:
    # Whoever ran a party in this process before may have left another word.
    BACKENDS.cudnn.rnn.fp32_precision = "tf32"
    # The flag of both can no longer be read.
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    back = plain_arithmetic()
    assert BACKENDS.cudnn.rnn.fp32_precision == "ieee"
    back()
    assert (BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cudnn.rnn.fp32_precision) == (
        "ieee",
        "tf32",
    )
