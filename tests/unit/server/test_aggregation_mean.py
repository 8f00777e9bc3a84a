"""The mean at the server, which rounds are left after a checkpoint, and what parties may
declare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.errors import assert_names, raises
from tests.harness.hostile import aggregation
from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.stages import AggregationPlan, make_label, parse_rounds_done
from vfl_party.outbound.exchange import to_bundle, to_tensors
from vfl_server.aggregation import average, compute_mean, find_outlier, yield_remaining_steps
from vfl_server.control.admission import MAX_BYTES, MAX_ROUNDS, agree_on_plans, parse_declarations

STEP = StepKey("pretrain", 2, 0)
CPU = torch.device("cpu")


def float32(numbers: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.asarray(numbers, np.float32)


def weights(**arrays: npt.NDArray[np.float32]) -> Bundle:
    return to_bundle(
        Kind.WEIGHTS, {name: torch.from_numpy(array) for name, array in arrays.items()}
    )


def values(bundle: Bundle) -> dict[str, npt.NDArray[np.float32]]:
    return {name: tensor.numpy() for name, tensor in to_tensors(bundle, CPU).items()}


# -- the mean


@given(st.integers(1, 6), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1))
def test_it_is_the_sum_in_roster_order_over_the_number_of_parties(
    parties: int, shape: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    drawn = [
        float32(rng.normal(size=shape) * 10.0 ** rng.integers(-20, 17)) for _ in range(parties)
    ]
    total = drawn[0].copy()
    for each in drawn[1:]:
        total = total + each
    bundles = {
        f"p{number}": weights(w=each, one=float32([number])) for number, each in enumerate(drawn)
    }
    got = compute_mean(bundles, STEP)
    assert got.kind is Kind.WEIGHTS
    assert list(got.tensors) == ["w", "one"]
    assert got.tensors["w"].shape == tuple(shape)
    np.testing.assert_array_equal(values(got)["w"], total / np.float32(parties))
    np.testing.assert_array_equal(values(got)["one"], float32([(parties - 1) / 2]))
    for bundle, each in zip(bundles.values(), drawn, strict=True):
        # What came in is as it was.
        np.testing.assert_array_equal(values(bundle)["w"], each)


def test_it_is_what_torch_computes() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1000, generator=generator) for _ in range(3)]
    got = compute_mean(
        {f"p{number}": to_bundle(Kind.WEIGHTS, {"w": t}) for number, t in enumerate(tensors)}, STEP
    )
    assert torch.equal(to_tensors(got, CPU)["w"], (tensors[0] + tensors[1] + tensors[2]) / 3)


def test_tensors_go_by_name_whatever_their_order() -> None:
    one = weights(a=float32([1]), b=float32([10]))
    other = weights(b=float32([20]), a=float32([3]))
    assert {
        name: array.item()
        for name, array in values(compute_mean({"p0": one, "p1": other}, STEP)).items()
    } == {"a": 2.0, "b": 15.0}


def test_a_received_buffer_may_be_read_only() -> None:
    buffer = Buffer(DType.FLOAT32, (1,), memoryview(float32([4]).tobytes()))
    assert (
        values(compute_mean({"p0": Bundle(Kind.WEIGHTS, {"w": buffer})}, STEP))["w"].item() == 4.0
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named(value: float) -> None:
    sick = np.zeros((2, 3), np.float32)
    sick[1, 2] = value
    with raises(PeerError, Code.NON_FINITE, party="p1") as caught:
        compute_mean({"p0": weights(a=np.zeros((2, 3), np.float32)), "p1": weights(a=sick)}, STEP)
    assert_names(caught.value.public, "p1")


@pytest.mark.parametrize("value", [1e30, -1e30, 3e38, np.nextafter(float32(1e18), float32(np.inf))])
def test_what_is_too_large_to_train_with_is_named(value: float) -> None:
    """Otherwise the party that trains on with the mean meets NaN, and is blamed."""
    large = np.array([1.0, value, 1.0], np.float32)
    with raises(PeerError, Code.NON_FINITE, party="p1") as caught:
        compute_mean({"p0": weights(a=np.zeros(3, np.float32)), "p1": weights(a=large)}, STEP)
    assert_names(caught.value.public, "p1", "18")


@pytest.mark.parametrize(
    ("norms", "found"),
    [
        ([1.0, 1.0, 1001.0], "p2"),
        ([1.0, 1.0, 999.0], ""),
        ([0.0, 1.0], ""),
        ([2e6], ""),
        ([1e17, 1.0], "p0"),
    ],
)
def test_whose_weights_outweigh_all_others(norms: list[float], found: str) -> None:
    bundles = {
        f"p{n}": weights(a=float32([norm]), b=np.zeros((0, 2), np.float32))
        for n, norm in enumerate(norms)
    }
    assert find_outlier(bundles) == found


def test_an_outlier_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    plan, told = aggregation("pretrain", 9, w=(1,)), set[str]()
    for _ in range(3):
        average({"p0": weights(w=float32([1])), "p1": weights(w=float32([1e6]))}, STEP, plan, told)
    (record,) = caplog.records
    assert_names(record.getMessage(), "p1", "000")


# -- which rounds are left

PHASES = ("first", "plain", "second")
BOTH = [aggregation("second", 2, w=(1,)), aggregation("first", 3, w=(2,))]


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [
        ("", "first.0 first.1 first.2 second.0 second.1"),
        ("000001.first.1", "first.1 first.2 second.0 second.1"),
        ("000003.first.3", "second.0 second.1"),
        ("000005.plain.2", "second.0 second.1"),
        ("000014.second.1", "second.1"),
        ("000015.second.2", ""),
    ],
)
def test_a_run_goes_on_where_its_checkpoint_is(checkpoint: str, steps: str) -> None:
    found = list(yield_remaining_steps(PHASES, checkpoint, BOTH))
    assert " ".join(f"{step.phase}.{step.round}" for step, _ in found) == steps
    assert all(step.batch == 0 for step, _ in found)
    assert all(each is BOTH[step.phase == "first"] for step, each in found)


@pytest.mark.parametrize(
    "label",
    ["x", "1.first", "first.1", "000001..1", "000001.first.x", "000001.first.", "1.third.1"],
)
def test_what_is_no_label(label: str) -> None:
    with raises(InputError, Code.CHECKPOINT_INVALID):
        list(yield_remaining_steps(PHASES, label, BOTH))


@given(
    st.integers(0, 999_999),
    st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True),
    st.integers(0, 999_999),
)
def test_a_label_says_what_is_done(position: int, phase: str, done: int) -> None:
    assert parse_rounds_done(make_label(position, phase, done)) == (phase, done)


# -- what a party may declare


def said(*entries: dict[str, Any]) -> control_pb2.Plan:
    plan = control_pb2.Plan()
    for entry in entries:
        tensors = entry.pop("tensors", [{"name": "w", "dtype": DType.FLOAT32, "shape": [2]}])
        added = plan.aggregations.add(**({"phase": "first", "rounds": 1} | entry))
        for tensor in tensors:
            added.tensors.add(**tensor)
    return plan


def of(**tensor: Any) -> dict[str, Any]:
    return {"tensors": [{"name": "w", "dtype": DType.FLOAT32, "shape": [2]} | tensor]}


# Numbers.
GIB = MAX_BYTES // 4
REFUSED: dict[str, tuple[list[dict[str, Any]], Code]] = {
    "a phase of no recipe": ([{"phase": "x" * 1000}], Code.MALFORMED_MESSAGE),
    "a phase twice": ([{}, {}], Code.MALFORMED_MESSAGE),
    "many phases": ([{"phase": f"x{number}"} for number in range(1000)], Code.MALFORMED_MESSAGE),
    "no rounds": ([{"rounds": 0}], Code.MALFORMED_MESSAGE),
    "endless rounds": ([{"rounds": MAX_ROUNDS + 1}], Code.MALFORMED_MESSAGE),
    "float16": ([of(dtype=DType.FLOAT16)], Code.TENSOR_MISMATCH),
    "integers": ([of(dtype=DType.INT64)], Code.TENSOR_MISMATCH),
    "no dtype": ([of(dtype=0)], Code.MALFORMED_MESSAGE),
    "an unknown dtype": ([of(dtype=99)], Code.MALFORMED_MESSAGE),
    "many tensors": (
        [
            {
                "tensors": [
                    {"name": f"w{n}", "dtype": DType.FLOAT32, "shape": []} for n in range(5000)
                ]
            }
        ],
        Code.MALFORMED_MESSAGE,
    ),
    "two tensors of one name": ([{"tensors": of()["tensors"] * 2}], Code.MALFORMED_MESSAGE),
    "many dimensions": ([of(shape=[1] * 9)], Code.MALFORMED_MESSAGE),
    "a long name": ([of(name="w" * 201)], Code.MALFORMED_MESSAGE),
    "a large tensor": ([of(shape=[GIB + 1])], Code.TENSOR_TOO_LARGE),
    "a shape whose product wraps around": ([of(shape=[2**32, 2**32])], Code.TENSOR_TOO_LARGE),
    "large together": ([of(shape=[GIB]), {"phase": "second"}], Code.TENSOR_TOO_LARGE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_declaration_that_nobody_would_serve_is_refused(case: str) -> None:
    entries, code = REFUSED[case]
    with raises(PeerError, code, party="p1") as caught:
        parse_declarations(said(*[dict(entry) for entry in entries]), PHASES, "p1")
    assert caught.value.public == str(caught.value)
    assert "p1" in caught.value.public
    assert len(caught.value.public) < 200


def test_a_declaration_is_read() -> None:
    (only,) = parse_declarations(said({"phase": "plain", "rounds": 7}), PHASES, "p1")
    assert (only.phase, only.rounds, only.spec.kind) == ("plain", 7, Kind.WEIGHTS)
    assert only.spec.tensors == {"w": TensorSpec(DType.FLOAT32, (2,))}
    assert parse_declarations(control_pb2.Plan(), PHASES, "p1") == ()
    assert len(parse_declarations(said(of(shape=[GIB])), PHASES, "p1")) == 1


def test_all_must_declare_the_same() -> None:
    same = {"p0": BOTH, "p1": [aggregation("first", 3, w=(2,)), aggregation("second", 2, w=(1,))]}
    assert [each.phase for each in agree_on_plans(same, PHASES)] == ["first", "second"]
    assert agree_on_plans({"p0": [], "p1": []}, PHASES) == ()


HINT = "give both the same top layers (model.encoder), or set aggregate = false"
DIFFERENCES: dict[str, tuple[list[AggregationPlan], str]] = {
    "shape": (
        [aggregation("first", 3, **{"top.0.weight": (64, 196), "top.0.bias": (64,)})],
        f"top encoders differ: in phase first, tensor 'top.0.weight' is float32 [64, 392] at bank and float32 [64, 196] at shop; {HINT}",
    ),
    "one more": (
        [
            aggregation(
                "first", 3, **{"top.0.weight": (64, 392), "top.0.bias": (64,), "top.2.bias": (1,)}
            )
        ],
        "top encoders differ: in phase first, tensor 'top.2.bias' is nothing at bank and float32 [1] at shop; "
        + HINT,
    ),
    "one less": (
        [aggregation("first", 3, **{"top.0.weight": (64, 392)})],
        "top encoders differ: in phase first, tensor 'top.0.bias' is float32 [64] at bank and nothing at shop; "
        + HINT,
    ),
    "rounds": (
        [aggregation("first", 4, **{"top.0.weight": (64, 392), "top.0.bias": (64,)})],
        "aggregation differs: phase first has 3 rounds at bank and 4 at shop",
    ),
    "none": (
        [],
        f"aggregation differs: in phase first, bank aggregates its top layers and shop does not; {HINT}",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_names_both_parties_the_phase_and_the_tensor(case: str) -> None:
    theirs, text = DIFFERENCES[case]
    ours = [aggregation("first", 3, **{"top.0.weight": (64, 392), "top.0.bias": (64,)})]
    with pytest.raises(PeerError) as caught:
        agree_on_plans({"bank": ours, "post": ours, "shop": theirs}, PHASES)
    assert (caught.value.code, caught.value.party, caught.value.exit_code) == (
        Code.MODELS_DIFFER,
        "",
        2,
    )
    assert str(caught.value) == caught.value.public == text


def test_a_difference_the_other_way_round() -> None:
    with raises(PeerError, Code.MODELS_DIFFER, names=("model.encoder", "shop")):
        agree_on_plans({"bank": [], "shop": [aggregation("first", 3, w=(2,))]}, PHASES)


def test_two_specs_of_the_same_tensors_agree() -> None:
    """A spec is equal only to itself; what it says is compared."""
    tensors = {"w": TensorSpec(DType.FLOAT32, (2,))}
    one, other = (
        AggregationPlan("first", 1, BundleSpec(Kind.WEIGHTS, dict(tensors))) for _ in range(2)
    )
    assert agree_on_plans({"p0": [one], "p1": [other]}, PHASES) == (one,)
