"""Checks that a party's Join message fits the recipe and the run, and that the parties declare the
same aggregations, and says why not. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vfl_common.bundle import OLDEST, PROTOCOL, BundleSpec, DType, TensorSpec
from vfl_common.config.recipe import Recipe
from vfl_common.config.spelling import find_first_difference
from vfl_common.errors import Code, PeerError
from vfl_common.frames import parse_header
from vfl_common.packing.coders import BITS, NAMES, Coding
from vfl_common.pb.vfl.v1 import control_pb2, tensor_pb2
from vfl_common.rpc.agreement import at, get_protocol_range, read_spelling, require_compatible
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_common.stages import AggregationPlan, Draw
from vfl_common.summary import PartySummary
from vfl_common.text import clean

# The maximum number of characters in a device, a run id, an address or a reason.
MAX_TEXT = 200
# A party's recipe that exceeds the server's by more characters is not compared key by key.
MAX_RECIPE = 16_384
# The maximum number of plug-ins that a party may name.
MAX_PLUGINS = 100
# The maximum number of bytes of all policies and grants that the parties send to each other.
MAX_ALL_SHOWN = 1 << 20
# A party may join again into a running generation 20 times, then 10 times a minute.
AGAIN_S, AGAIN = 6.0, 20


def admit(
    name: str,
    join: control_pb2.Join,
    recipe: Recipe,
    job: str,
    joined: Mapping[str, control_pb2.Join],
    oldest: int = OLDEST,
) -> None:
    """Checks that a party may join. Returns if it may, and raises PeerError if not.

    Args:
        joined: {party: its Join message} for the other parties that have joined. This party must
            have the same plug-ins, the same defaults in the recipe's phases and, for a prediction,
            the same trained run.
        oldest: The oldest protocol version with which the server can serve the recipe.

    Raises:
        PeerError: PROTOCOL_DIFFERS, ROLE_MISMATCH, MALFORMED_MESSAGE, RECIPE_DIFFERS,
            PLUGINS_DIFFER.
    """
    runs = {other.run_id for other in joined.values()}
    expected = recipe.party(name)
    _compare_protocols(name, join, oldest)
    if expected is None or join.role != expected.role:
        raise PeerError(
            Code.ROLE_MISMATCH,
            f"{name} joins as {clean(join.role, 20)!r}; in the recipe it is "
            f"{expected.role if expected else 'nobody'}",
            party=name,
        )
    _require_bounds(name, join)
    is_known_recipe = any(
        (theirs.recipe_json, theirs.filled_json) == (join.recipe_json, join.filled_json)
        and theirs.written == join.written
        for theirs in joined.values()
    )
    difference = "" if is_known_recipe else _describe_difference(recipe, join)
    if difference:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"the recipe of {name} differs from the server's{difference}",
            party=name,
        )
    if join.job != job:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"{name} wants to {clean(join.job, 20)}, but this server runs a {job} job",
            party=name,
        )
    if job == "predict" and runs and join.run_id not in runs:
        raise PeerError(
            Code.RECIPE_DIFFERS,
            f"{name} predicts with run {clean(join.run_id, 80)}, but the others with "
            f"{', '.join(runs)}",
            party=name,
        )
    for other, theirs in joined.items():
        require_compatible(name, join, other, theirs)


def _require_bounds(name: str, join: control_pb2.Join) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) if a text is too long or there are too many plug-ins."""
    texts = (join.device, join.device_name, join.run_id, join.exchange_address, join.version)
    if max(map(len, texts)) > MAX_TEXT:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} joins with a device, a run, an address or a version of more than "
            f"{MAX_TEXT} characters",
            party=name,
        )
    longest = max((len(text) for named in join.plugins.items() for text in named), default=0)
    if len(join.plugins) > MAX_PLUGINS or longest > MAX_TEXT:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} joins with more than {MAX_PLUGINS} plug-ins, or one of more than "
            f"{MAX_TEXT} characters",
            party=name,
        )


def require_small_tables(name: str, join: control_pb2.Join, texts: Mapping[str, str]) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) if a party's policy and grant are too large to be passed
    on to the other parties.

    ``texts``: {party: its policy and grant as JSON} for the parties that have joined.
    """
    size = len(join.shown_json.encode())
    total_size = size + sum(len(text.encode()) for other, text in texts.items() if other != name)
    if size > MAX_SHOWN_BYTES or total_size > MAX_ALL_SHOWN:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{name} sends the others {size:,} bytes of its policy and its grant; a party may "
            f"send {MAX_SHOWN_BYTES:,} bytes, and all parties together {MAX_ALL_SHOWN:,}",
            party=name,
        )


def choose_protocol(joined: Collection[control_pb2.Join]) -> int:
    """Returns the newest protocol version that this server and all of ``joined`` support."""
    return min([PROTOCOL, *(join.protocol for join in joined)])


def offers_of(join: control_pb2.Join, run_id: str) -> tuple[str, ...]:
    """Returns the checkpoint labels at which a party can resume run ``run_id``; '' is the beginning
    of the run.
    """
    return tuple(join.checkpoints) if join.run_id == run_id else ("",)


def identity_of(name: str, join: control_pb2.Join) -> PartySummary:
    """Returns the summary's entry for a party that has joined."""
    return PartySummary(
        name=name,
        role="active" if join.role == "active" else "passive",
        pid=join.pid,
        device=join.device,
        device_name=join.device_name,
        version=join.version,
    )


def facts_of(join: control_pb2.Join) -> dict[str, str | int]:
    """Returns the facts that the event ``joined`` reports of a party."""
    version = {"version": clean(join.version)} if join.version else {}
    return {"role": join.role, "device": join.device, **version, "protocol": join.protocol}


def require_return(name: str, join: control_pb2.Join, run_id: str, spoken: int) -> None:
    """Checks that a party can return to the current generation. Returns if it can, and raises
    PeerError if not.

    Args:
        spoken: The protocol version of the current generation.

    Raises:
        PeerError: CHECKPOINT_INVALID, PROTOCOL_DIFFERS.
    """
    if join.unfit or join.run_id != run_id:
        raise make_lacking_error(name, run_id, "the step that is under way")
    min_protocol, max_protocol = get_protocol_range(join)
    if not min_protocol <= spoken <= max_protocol:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, and the current generation {spoken}. Install "
            f"the earlier version again at {name}.",
            party=name,
        )


def make_lacking_error(name: str, run_id: str, label: str) -> PeerError:
    """Returns the error for a party that cannot resume where the other parties can."""
    return PeerError(
        Code.CHECKPOINT_INVALID,
        f"{name} cannot resume run {run_id} at {label}, as the others can. Start it with the "
        "folder of runs that it had before, or begin a new run with vfl-server run --fresh.",
        party=name,
    )


def make_other_run_error(
    name: str, other: str, run_id: str, server: str, *, begun: bool
) -> PeerError:
    """Returns the error for a party that has checkpoints of the unfinished run ``other``.

    ``begun``: Whether the server's run has begun. If so, only the party is wrong. If not, the
    server's run must not begin.
    """
    return PeerError(
        Code.CHECKPOINT_INVALID,
        f"{name} has checkpoints of run {clean(other, 80)}, which has not ended, and {server} is "
        f"in run {run_id}. Start {name} with the folder of runs that it had before."
        if begun
        else f"{name} has checkpoints of run {clean(other, 80)}, which has not ended, and {server} "
        "has not. Start the server with the folder of runs that it had before, or begin a new run "
        "with vfl-server run --fresh.",
        party=name,
    )


def explain_unfit(name: str, join: control_pb2.Join) -> str:
    """Returns a sentence that says why a party cannot resume its run."""
    return f"{name} cannot resume run {join.run_id}: {clean(join.unfit, MAX_TEXT)}"


def make_unfit_error(name: str, why: str, within_s: float) -> PeerError:
    """Returns the error for a run that a party cannot resume and that is too young to be set aside.

    ``within_s``: The seconds after its last training after which a run may be set aside.
    """
    return PeerError(
        Code.DATA_INVALID,
        f"{why}. Restore its data, or begin a new run with vfl-server run --fresh, at the server "
        f"alone (the same commands do so from run.resume_within_s, {within_s:g} s after the run "
        "trained last).",
        party=name,
    )


def make_second_session_error(name: str) -> PeerError:
    """Returns the error for a second session of a party whose first session is alive."""
    return PeerError(
        Code.NAME_TAKEN, f"a party named {name} has already joined and is alive", party=name
    )


def make_already_left_error(name: str, run_id: str) -> PeerError:
    """Returns the error for a party that has left the run and joins again."""
    return PeerError(
        Code.NAME_TAKEN,
        f"{name} has finished its part of run {run_id}, which continues without it; nothing to do",
        party=name,
    )


def make_too_often_error(name: str) -> PeerError:
    """Returns the error for a party that joins again too often, which ends a generation each
    time.
    """
    return PeerError(
        Code.NAME_TAKEN,
        f"{name} has joined again {AGAIN} times in a short time, so it may not interrupt the "
        "run now. "
        "Start it again in a minute.",
        party=name,
    )


def require_place(name: str, recipe: Recipe) -> None:
    """Raises PeerError (NOT_IN_RECIPE) if ``name`` is not a party of ``recipe``."""
    if recipe.party(name) is None:
        # An unknown caller does not learn the names of the parties.
        raise PeerError(
            Code.NOT_IN_RECIPE, f"{name} is not a party of recipe {recipe.name}", party=name
        ).privately(
            f"{name} is not a party of recipe {recipe.name} (parties: "
            f"{', '.join(party.name for party in recipe.parties)})"
        )


def _compare_protocols(name: str, join: control_pb2.Join, oldest: int) -> None:
    """Raises PeerError if the server and the party support no common protocol version that the
    recipe allows.
    """
    min_protocol, max_protocol = get_protocol_range(join)
    if OLDEST <= max_protocol < oldest:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, and this recipe needs {oldest}. Install the "
            f"server's version at {name}.",
            party=name,
        )
    if max_protocol < oldest or min_protocol > PROTOCOL:
        raise PeerError(
            Code.PROTOCOL_DIFFERS,
            f"{name} speaks protocol {max_protocol}, the server {OLDEST} and {PROTOCOL}. Install "
            "the same version.",
            party=name,
        )


def _describe_difference(recipe: Recipe, join: control_pb2.Join) -> str:
    """Returns a phrase that says where a party's recipe differs from the server's; '' if it does
    not differ.

    A party of an earlier release sends only the recipe's canonical form.
    """
    canonical = recipe.canonical_json()
    try:
        if join.filled_json:
            difference = read_spelling(join, len(canonical)).difference(recipe.spelling())
        elif len(join.recipe_json) > len(canonical) + MAX_RECIPE:
            return " in size"
        else:
            difference = find_first_difference(join.recipe_json, canonical)
    except (ValueError, RecursionError):
        return " and is not JSON"
    # The canonical forms must be identical, because the recipe's digest is computed from them.
    if difference is None:
        return "" if join.recipe_json == canonical else " in form"
    return at(difference, "the server")


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
            difference = _describe_plan_difference(
                first_party, first_plans.get(phase), party, plans.get(phase)
            )
            if difference:
                # The error has no ``party``, so that all parties get the same text.
                raise PeerError(Code.MODELS_DIFFER, difference)
    return tuple(first_plans[phase] for phase in phases if phase in first_plans)


def _describe_plan_difference(
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
