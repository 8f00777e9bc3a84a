"""Checks and compares the aggregations that the parties declare. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vfl_common.bundle import BundleSpec, DType, TensorSpec
from vfl_common.errors import Code, PeerError
from vfl_common.packing.coding import BITS, NAMES, Coding
from vfl_common.pb.vfl.v1 import control_pb2, tensor_pb2
from vfl_common.stages import AggregationPlan, Draw
from vfl_common.wire.frames import parse_header

# All weights that a party declares.
MAX_BYTES = 2 << 30
MAX_ROUNDS = 1_000_000
# Characters of a tensor's name.
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
            what = "twice" if entry.phase in plans else "which is not in the recipe"
            raise _refuse(
                Code.MALFORMED_MESSAGE, party, f"aggregates in phase {entry.phase[:40]!r}, {what}"
            )
        if not 0 < entry.rounds <= MAX_ROUNDS:
            text = (
                f"aggregates {entry.rounds} rounds in phase {entry.phase}; 1 to {MAX_ROUNDS} "
                "are possible"
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
                    f"aggregates a tensor with a name of {len(name)} characters; at most "
                    f"{MAX_NAME} are possible"
                )
                raise _refuse(Code.MALFORMED_MESSAGE, party, text)
        up, down = _coding(entry.up, party), _coding(entry.down, party)
        spec = BundleSpec(kind, tensors)
        plans[entry.phase] = AggregationPlan(
            entry.phase, entry.rounds, spec, entry.passive, up, down, _draw(entry, party)
        )
    if sum(aggregation.spec.payload_bytes for aggregation in plans.values()) > MAX_BYTES:
        raise _refuse(
            Code.TENSOR_TOO_LARGE, party, f"aggregates weights of more than {MAX_BYTES >> 30} GiB"
        )
    return tuple(plans.values())


def agree_on_plans(
    declarations: Mapping[str, Sequence[AggregationPlan]], phases: Sequence[str]
) -> tuple[AggregationPlan, ...]:
    """Returns the common declaration, in the order of ``phases``. Raises PeerError (MODELS_DIFFER)
    if parties differ.

    ``declarations``: {party: its declaration}, in the order of the roster.
    """
    by_phase = {
        party: {plan.phase: plan for plan in plans} for party, plans in declarations.items()
    }
    (first, ours), *others = by_phase.items()
    for party, theirs in others:
        for phase in phases:
            difference = _difference(first, ours.get(phase), party, theirs.get(phase))
            if difference:
                # The error names no party, so that all get the same text.
                raise PeerError(Code.MODELS_DIFFER, difference)
    return tuple(ours[phase] for phase in phases if phase in ours)


def _difference(
    one: str, ours: AggregationPlan | None, other: str, theirs: AggregationPlan | None
) -> str:
    """Words the difference in one sentence; returns '' if the two are equal."""
    if ours is None or theirs is None:
        if ours is theirs:
            return ""
        phase = ours.phase if ours is not None else theirs.phase if theirs is not None else ""
        does, does_not = (one, other) if theirs is None else (other, one)
        what = f"{does} aggregates its top layers and {does_not} does not"
        return f"aggregation differs: in phase {phase}, {what}; {_HINT}"
    if ours.rounds != theirs.rounds:
        what = (
            f"phase {ours.phase} has {ours.rounds} rounds at {one} and {theirs.rounds} at {other}"
        )
        return f"aggregation differs: {what}"
    if ours.passive != theirs.passive:
        with_, without = (other, one) if ours.passive else (one, other)
        return (
            f"aggregation differs: in phase {ours.phase}, {with_} counts the active party and "
            f"{without} does not"
        )
    if ours.draw != theirs.draw:
        what = f"in phase {ours.phase}, {one} and {other} draw the parties of a round differently"
        return f"aggregation differs: {what}; give both the same recipe"
    for way, mine_, theirs_ in (("up", ours.up, theirs.up), ("down", ours.down, theirs.down)):
        if mine_ != theirs_:
            what = (
                f"in phase {ours.phase}, weights go {way} as {mine_} at {one} and as {theirs_} "
                f"at {other}"
            )
            return f"aggregation differs: {what}; give both the same recipe"
    for name in [*ours.spec.tensors, *theirs.spec.tensors]:
        mine, yours = ours.spec.tensors.get(name), theirs.spec.tensors.get(name)
        if mine != yours:
            what = f"tensor {name[:40]!r} is {_words(mine)} at {one} and {_words(yours)} at {other}"
            return f"top encoders differ: in phase {ours.phase}, {what}; {_HINT}"
    return ""


_HINT = "give both the same top layers (model.encoder), or set aggregate = false"


def _coding(coding: control_pb2.Coding, party: str) -> Coding:
    """Reads how weights are written. Raises PeerError (MALFORMED_MESSAGE) if that is unknown."""
    name = next((known for known in NAMES if known == (coding.name or "identity")), None)
    bits = next((known for known in BITS if known == coding.bits), None)
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


def _draw(entry: control_pb2.Aggregation, party: str) -> Draw | None:
    """Reads who takes part in which round. Raises PeerError (MALFORMED_MESSAGE) if that is nobody,
    or no draw has rounds.
    """
    if not entry.HasField("draw"):
        return None
    if not (entry.draw.number and entry.draw.rounds):
        raise _refuse(Code.MALFORMED_MESSAGE, party, "draws no party, or for no round")
    return Draw(entry.draw.number, entry.draw.rounds, entry.draw.seed)


def _words(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype.name.lower()} {list(spec.shape)}"


def _refuse(code: Code, party: str, what: str) -> PeerError:
    return PeerError(code, f"{party} {what}", party=party)
