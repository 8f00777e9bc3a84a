"""Tensors to bundles and back, without copies where none are needed; finiteness, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.errors import assert_names, raises
from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey, TensorSpec
from vfl_common.errors import Code, InternalError, PeerError
from vfl_party.base.devices import TORCH, copy_index
from vfl_party.outbound.declared import Sent, f32, spec_of
from vfl_party.outbound.exchange import (
    check_finite,
    nonfinite,
    take_in,
    to_bundle,
    to_tensors,
    wait_for_gpus,
)

CPU = torch.device("cpu")
STEP = StepKey("train", 3, 7)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = TORCH[draw(st.sampled_from(DType))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = torch.tensor(list(draw(st.binary(min_size=8 * 64, max_size=8 * 64))), dtype=torch.uint8)
    n = torch.Size(shape).numel()
    flat = raw[:n] > 127 if dtype is torch.bool else raw[: n * dtype.itemsize].clone().view(dtype)
    tensor = flat.view(shape)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw_a, raw_b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)


@given(st.dictionaries(st.text(max_size=5), tensors(), max_size=3), st.booleans())
@settings(max_examples=60)
def test_tensors_survive_a_bundle_bit_by_bit(
    named: dict[str, torch.Tensor], read_only: bool
) -> None:
    bundle = to_bundle(Kind.EMBEDDING, named)
    if read_only:
        bundle = Bundle(
            bundle.kind,
            {
                k: Buffer(b.dtype, b.shape, memoryview(bytes(b.data)))
                for k, b in bundle.tensors.items()
            },
        )
    for name, buffer in bundle.tensors.items():
        assert TensorSpec(buffer.dtype, buffer.shape) == spec_of(
            named[name].dtype, *named[name].shape
        )
        assert (buffer.data.nbytes, buffer.data.ndim, buffer.data.format) == (
            named[name].nbytes,
            1,
            "B",
        )
    back = to_tensors(bundle, CPU)
    assert list(back) == list(named)
    assert all(same_bits(back[name], named[name]) for name in named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_contiguous_cpu_tensor_is_not_copied(dtype: torch.dtype) -> None:
    x = torch.ones(3, 4, dtype=dtype)
    back = to_tensors(to_bundle(Kind.EMBEDDING, {"z": x}), CPU)["z"]
    assert back.data_ptr() == x.data_ptr()


def test_a_graph_stays_behind() -> None:
    z = torch.ones(2, 2, requires_grad=True) * 2
    back = to_tensors(to_bundle(Kind.EMBEDDING, {"z": z}), CPU)["z"]
    assert not back.requires_grad
    back.requires_grad_().sum().backward()
    assert back.grad is not None


def test_buffers_that_torch_cannot_view_are_copied() -> None:
    frame = bytearray(17)
    frame[1:5] = torch.tensor([1.5]).numpy().tobytes()
    odd = Buffer(DType.FLOAT32, (1,), memoryview(frame)[1:5])
    assert to_tensors(Bundle(Kind.ROWS, {"x": odd}), CPU)["x"].tolist() == [1.5]
    bools = Buffer(DType.BOOL, (3,), memoryview(bytearray([0, 1, 255])))
    flags = to_tensors(Bundle(Kind.ROWS, {"x": bools}), CPU)["x"]
    assert flags.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_dtype_that_the_wire_lacks_is_named() -> None:
    with raises(InternalError, Code.INTERNAL, names=("torch.float64", "torch.float32")):
        to_bundle(Kind.GRADIENT, {"z": torch.zeros(2, dtype=torch.float64)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(), (1,), (33, 65)])
def test_one_bad_element_is_found(dtype: torch.dtype, bad: float, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=dtype)
    assert not nonfinite(x)
    x.view(-1)[-1] = bad
    assert nonfinite(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_finite_elements_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert not nonfinite(torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype))


def test_infinities_of_both_signs_do_not_cancel_and_integers_are_finite() -> None:
    assert nonfinite(torch.tensor([float("inf"), float("-inf")]))
    assert not nonfinite(torch.tensor([2**62] * 4))
    assert not nonfinite(torch.tensor([True, False]))
    assert not nonfinite(torch.zeros(0))


def test_the_error_names_party_tensor_and_step_to_the_peer() -> None:
    check_finite({"a": torch.ones(2)}, party="bank", step=STEP)
    with raises(PeerError, Code.NON_FINITE, party="bank") as caught:
        check_finite(
            {"a": torch.ones(2), "dz": torch.tensor([float("nan")])}, party="bank", step=STEP
        )
    assert_names(caught.value.public, "dz", "bank")


def test_what_a_peer_sent_is_looked_at_and_not_copied() -> None:
    x = torch.ones(3, 4)
    found = take_in(to_bundle(Kind.EMBEDDING, {"z": x}), CPU, party="bank", step=STEP)
    assert found["z"].data_ptr() == x.data_ptr()
    assert copy_index(rows := torch.arange(3), CPU) is rows
    x[2, 3] = float("nan")
    with raises(PeerError, Code.NON_FINITE, names="bank"):
        take_in(to_bundle(Kind.EMBEDDING, {"z": x}), CPU, party="bank", step=STEP)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_buffers_may_be_overwritten_at_once_around_a_gpu() -> None:
    """Behind a queue of kernels, a copy that nobody waited for would see what comes later."""
    device = torch.device("cuda:0")
    busy = torch.randn(2048, 2048, device=device)
    for round_ in range(20):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        z = torch.full((512, 1024), float(round_), device=device)
        bundle = to_bundle(Kind.EMBEDDING, {"z": z, "w": z.T})
        assert bytes(bundle.tensors["z"].data) == bytes(
            torch.full((512, 1024), float(round_)).numpy().data
        )
        pinned = torch.full((512, 1024), float(round_)).pin_memory()
        raw = Buffer(DType.FLOAT32, (512, 1024), pinned.numpy().data.cast("B"))
        back = take_in(Bundle(Kind.EMBEDDING, {"z": raw}), device, party="bank", step=STEP)["z"]
        pinned.fill_(-1.0)
        assert bool((back + 0 * busy[:512, :1024] == round_).all())
        rows = torch.randperm(512)
        assert torch.equal(copy_index(rows, device).cpu(), rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_survive_a_gpu() -> None:
    device = torch.device("cuda:0")
    named = {
        "z": torch.randn(64, 256, device=device).T,
        "n": torch.arange(5, device=device),
        "e": torch.zeros(0).cuda(),
    }
    back = to_tensors(to_bundle(Kind.EMBEDDING, named), device)
    assert all(torch.equal(back[name], named[name]) and back[name].is_cuda for name in named)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_work_is_done_before_encoding_begins() -> None:
    device = torch.device("cuda:0")
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(50):
        busy = (busy @ busy).clamp(-1, 1)
    assert not torch.cuda.current_stream(device).query()
    wait_for_gpus({"z": busy, "on the host": torch.zeros(1)})
    assert torch.cuda.current_stream(device).query()


def test_exactness_tests_in_float64_send_no_float32(float64: None) -> None:
    """What they compare to 1e-12 has been float64 all the way, in 8 bytes a number."""
    sent = Sent(Kind.EMBEDDING, {"z": f32("rows", 2)})
    bundle = to_bundle(Kind.EMBEDDING, {"z": torch.ones(3, 2)})
    assert bundle.payload_bytes == sent.spec(rows=3).payload_bytes == 8 * 3 * 2
    assert to_tensors(bundle, CPU)["z"].dtype is torch.float64
    with raises(InternalError, Code.INTERNAL, names=("torch.float32", "torch.float64")):
        to_bundle(Kind.EMBEDDING, {"z": torch.ones(3, 2, dtype=torch.float32)})
