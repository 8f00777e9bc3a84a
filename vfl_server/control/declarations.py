"""Checks and compares the aggregations that the parties declare. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vfl_common.bundle import BundleSpec, DType, TensorSpec
from vfl_common.errors import Code, PeerError
from vfl_common.packing.coding import BITS, NAMES, Coding
from vfl_common.pb.vfl.v1 import control_pb2, tensor_pb2
from vfl_common.stages import AggregationPlan, Draw
from vfl_common.wire.frames import parse_header

# The maximum number of bytes of all weights that a party declares.
MAX_BYTES = 2 << 30
MAX_ROUNDS = 1_000_000
# The maximum number of characters in a tensor's name.
MAX_NAME = 200
_KIND = tensor_pb2.BundleKind.WEIGHTS


def parse_declarations(
    plan: control_pb2.Plan, phases: Sequence[str], party: str
) -> tuple[AggregationPlan, ...]:
    """Reads the aggregations that ``party`` declares.

    Raises PeerError if a phase is not in ``phases`` or appears twice, if rounds, names or sizes
    exceed the bounds above, if a tensor is not float32, or if a codec is unknown.
    """
    plans: dict[str, AggregationPlan] = {}
    for entry in plan.aggregations[: len(phases) + 1]:
        if entry.phase not in phases or entry.phase in plans:
            problem = "twice" if entry.phase in plans else "which is not in the recipe"
            raise _refuse(
                Code.MALFORMED_MESSAGE,
                party,
                f"aggregates in phase {entry.phase[:40]!r}, {problem}",
            )
        if not 0 < entry.rounds <= MAX_ROUNDS:
            text = (
                f"aggregates {entry.rounds} rounds in phase {entry.phase}; choose 1 to "
                f"{MAX_ROUNDS} "
                "rounds"
            )
            raise _refuse(Code.MALFORMED_MESSAGE, party, text)
        kind, tensors = parse_header(
            tensor_pb2.BundleHeader(kind=_KIND, tensors=entry.tensors), party
        )
        for name, tensor in tensors.items():
            if tensor.dtype is not DType.FLOAT32:
                text = (
                    f"aggregates tensor {name[:40]!r} of {tensor.dtype.name.lower()}; only "
                    "float32 can be averaged"
                )
                raise _refuse(Code.TENSOR_MISMATCH, party, text)
            if len(name) > MAX_NAME:
                text = (
                    f"aggregates a tensor with a name of {len(name)} characters; the maximum is "
                    f"{MAX_NAME}"
                )
                raise _refuse(Code.MALFORMED_MESSAGE, party, text)
        up, down = _parse_coding(entry.up, party), _parse_coding(entry.down, party)
        spec = BundleSpec(kind, tensors)
        plans[entry.phase] = AggregationPlan(
            entry.phase, entry.rounds, spec, entry.passive, up, down, _parse_draw(entry, party)
        )
    if sum(aggregation.spec.payload_bytes for aggregation in plans.values()) > MAX_BYTES:
        raise _refuse(
            Code.TENSOR_TOO_LARGE, party, f"aggregates weights of more than {MAX_BYTES >> 30} GiB"
        )
    return tuple(plans.values())


def agree_on_plans(
    declarations: Mapping[str, Sequence[AggregationPlan]], phases: Sequence[str]
) -> tuple[AggregationPlan, ...]:
    """Returns the aggregations that all parties declare, in the order of ``phases``. Raises
    PeerError (MODELS_DIFFER) if the declarations differ.

    ``declarations``: {party: its declared aggregations}, in roster order.
    """
    by_phase = {
        party: {plan.phase: plan for plan in plans} for party, plans in declarations.items()
    }
    (first_party, first_plans), *other_plans = by_phase.items()
    for party, plans in other_plans:
        for phase in phases:
            difference = _describe_difference(
                first_party, first_plans.get(phase), party, plans.get(phase)
            )
            if difference:
                # The error has no ``party``, so that all parties get the same text.
                raise PeerError(Code.MODELS_DIFFER, difference)
    return tuple(first_plans[phase] for phase in phases if phase in first_plans)


def _describe_difference(
    party: str, plan: AggregationPlan | None, other_party: str, other_plan: AggregationPlan | None
) -> str:
    """Returns a sentence that describes how two parties' plans differ; '' if they are the same."""
    if plan is None or other_plan is None:
        if plan is other_plan:
            return ""
        phase = (
            plan.phase if plan is not None else other_plan.phase if other_plan is not None else ""
        )
        does, does_not = (party, other_party) if other_plan is None else (other_party, party)
        difference = f"{does} aggregates its top layers and {does_not} does not"
        return f"aggregation differs: in phase {phase}, {difference}; {_HINT}"
    if plan.rounds != other_plan.rounds:
        difference = (
            f"phase {plan.phase} has {plan.rounds} rounds at {party} and "
            f"{other_plan.rounds} at {other_party}"
        )
        return f"aggregation differs: {difference}"
    if plan.passive != other_plan.passive:
        with_, without = (other_party, party) if plan.passive else (party, other_party)
        return (
            f"aggregation differs: in phase {plan.phase}, {with_} counts the active party and "
            f"{without} does not"
        )
    if plan.draw != other_plan.draw:
        difference = (
            f"in phase {plan.phase}, {party} and {other_party} draw the parties of a "
            "round differently"
        )
        return f"aggregation differs: {difference}; give both the same recipe"
    for direction, coding, other_coding in (
        ("up", plan.up, other_plan.up),
        ("down", plan.down, other_plan.down),
    ):
        if coding != other_coding:
            difference = (
                f"in phase {plan.phase}, weights go {direction} as {coding} at {party} and as "
                f"{other_coding} "
                f"at {other_party}"
            )
            return f"aggregation differs: {difference}; give both the same recipe"
    for name in [*plan.spec.tensors, *other_plan.spec.tensors]:
        spec, other_spec = plan.spec.tensors.get(name), other_plan.spec.tensors.get(name)
        if spec != other_spec:
            difference = (
                f"tensor {name[:40]!r} is {_describe_spec(spec)} at {party} and "
                f"{_describe_spec(other_spec)} at {other_party}"
            )
            return f"top encoders differ: in phase {plan.phase}, {difference}; {_HINT}"
    return ""


_HINT = "give both the same top layers (model.encoder), or set aggregate = false"


def _parse_coding(coding: control_pb2.Coding, party: str) -> Coding:
    """Reads the codec with which weights are encoded. Raises PeerError (MALFORMED_MESSAGE) if the
    codec is unknown.
    """
    name = next((value for value in NAMES if value == (coding.name or "identity")), None)
    bits = next((value for value in BITS if value == coding.bits), None)
    if (
        name is None
        or bits is None
        or (name == "bits") != bool(bits)
        or (coding.stochastic and not bits)
    ):
        raise _refuse(
            Code.MALFORMED_MESSAGE, party, f"aggregates with an unknown codec {coding.name[:40]!r}"
        )
    return Coding(name, bits, coding.stochastic, coding.seed)


def _parse_draw(entry: control_pb2.Aggregation, party: str) -> Draw | None:
    """Reads how many parties are drawn, and for how many rounds. Raises PeerError
    (MALFORMED_MESSAGE) if either number is 0.
    """
    if not entry.HasField("draw"):
        return None
    if not (entry.draw.number and entry.draw.rounds):
        raise _refuse(
            Code.MALFORMED_MESSAGE, party, "must draw at least one party for at least one round"
        )
    return Draw(entry.draw.number, entry.draw.rounds, entry.draw.seed)


def _describe_spec(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype.name.lower()} {list(spec.shape)}"


def _refuse(code: Code, party: str, problem: str) -> PeerError:
    return PeerError(code, f"{party} {problem}", party=party)
