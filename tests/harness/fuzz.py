"""Mutated messages for the codecs, for what a message sets off, and for live services.

Only errors of the catalogue may come of any of them, and no InternalError. All chance comes from
one seed.
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.contract.exchanges import ACTIVE, GrpcExchange, credentials, keyring
from tests.harness import cases
from vfl_common.bundle import (
    PROTOCOL,
    Buffer,
    Bundle,
    BundleSpec,
    DType,
    Entry,
    Kind,
    Ledger,
    StepKey,
    TensorSpec,
)
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InternalError, PeerError, VflError
from vfl_common.frames import Assembly, encode, parse_frame, parse_header
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2, failure_pb2
from vfl_common.process.logs import _describe_event
from vfl_common.rpc import session as sessions
from vfl_common.rpc.channel import dial, run_server
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import Done, Joining, to_failure
from vfl_common.rpc.session import Session
from vfl_common.rpc.uplink import SERVICE
from vfl_common.run_folder import RunFolder
from vfl_common.text import to_json
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.membership import Member
from vfl_server.control.run import RunHooks, RunState, ServedRun
from vfl_server.control.service import ControlService, _parse
from vfl_server.results import summarise

ROSTER = ("p0", "p1", "p2")
RECIPE = Recipe.model_validate(cases.recipe(3, run={"heartbeat_s": 0.05, "server_absent_s": 60.0}))
TEXTS = (
    *(
        "",
        "p0",
        "p1",
        "eve",
        "run",
        "../../x",
        "\x1b[2J\r\n\x00",
        "\u202e\U0001f600",
        "x" * 300,
        "x" * 5_000,
    ),
    *(
        "000001.splitnn.1",
        "-1.a.b",
        "\u0661.a.\u0661",
        "{",
        "[]",
        "{}",
        "3",
        "null",
        "NaN",
        "[" * 20_000,
        "sent",
    ),
    *(
        '{"test": {"loss": null}}',
        '{"test": {"loss": 1e999}}',
        '{"test": {"loss": 1' + "0" * 400 + "}}",
    ),
    *(
        '{"test": {"loss": 1' + "0" * 5_000 + "}}",
        '{"test": 3}',
        '{"\\ud800": {"\\ud800": 1}}',
        '{"phases": [1]}',
    ),
    *(
        RECIPE.canonical_json()[:-1] + more
        for more in (',"\\ud800\\u001b":1}', ',"x":1' + "0" * 5_000 + "}", "}}")
    ),
)
NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    14,
    24,
    25,
    29,
    127,
    128,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FLOATS = (0.0, -1.0, 0.1, 1e-320, 1e308, math.nan, math.inf, -math.inf)
# Entries that are added to a list.
MANY = (1, 1, 2, 40)

SPEC = BundleSpec(
    Kind.EMBEDDING, {"z": TensorSpec(DType.FLOAT32, (2, 3)), "n": TensorSpec(DType.INT64, (1,))}
)
BUNDLE = Bundle(
    SPEC.kind,
    {
        name: Buffer(s.dtype, s.shape, memoryview(bytes(s.nbytes)))
        for name, s in SPEC.tensors.items()
    },
)
STEP = StepKey("train", 0, 0)
CALL_S = 20.0


# -- mutations


def odd(field: FieldDescriptor, chance: Random) -> Any:
    """Returns a value for a plain field."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    bits = {FieldDescriptor.CPPTYPE_UINT64: 64, FieldDescriptor.CPPTYPE_UINT32: 32}.get(kind, 31)
    return chance.choice(NUMBERS) % 2**bits


def change(message: Message, chance: Random) -> None:
    """Changes one field of a message, or of a message in it."""
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    there = [field for field, _ in message.ListFields()]
    field = chance.choice(there if there and chance.random() < 0.5 else fields)
    inner = field.message_type
    if chance.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        values: Any = getattr(message, field.name)
        for _ in range(chance.choice(MANY)):
            if inner is not None and inner.GetOptions().map_entry:
                values[chance.choice(TEXTS)] = odd(inner.fields_by_name["value"], chance)
            elif inner is not None:
                change(values.add(), chance)
            else:
                values.append(odd(field, chance))
    elif inner is not None:
        part: Message = getattr(message, field.name)
        part.SetInParent()
        change(part, chance)
    else:
        setattr(message, field.name, odd(field, chance))


def scramble(data: bytes, chance: Random) -> bytes:
    """Changes, removes, repeats and adds some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, many = chance.randrange(len(changed) + 1), chance.choice((1, 1, 2, 7))
        how = chance.randrange(5)
        if how == 0:
            changed[at : at + many] = chance.randbytes(many)
        elif how == 1:
            del changed[at : at + many]
        elif how == 2:
            changed[at:at] = changed[max(0, at - many) : at]
        elif how == 3:
            changed[at:at] = b"\xff" * many
        else:
            del changed[at:]
    return bytes(changed)


def mutated(message: Message, chance: Random) -> bytes:
    """Returns the bytes of a message of which fields or bytes, or both, were changed; now and then
    of the message.
    """
    message = deepcopy(message)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
        change(message, chance)
    data = message.SerializeToString()
    return scramble(data, chance) if chance.random() < 0.4 else data


# -- honest messages


def join_of(name: str) -> control_pb2.PartyMessage:
    role = "active" if name == "p0" else "passive"
    address = "127.0.0.1:7001" if name == "p0" else ""
    join = control_pb2.Join(
        role=role, protocol=PROTOCOL, recipe_json=RECIPE.canonical_json(), job="train"
    )
    join.checkpoints.append("")
    join.exchange_address, join.pid, join.device = address, 7, "cpu"
    return control_pb2.PartyMessage(join=join)


def claim_of(name: str) -> control_pb2.PartyMessage:
    """A party joins a server that was away."""
    made = join_of(name)
    made.join.run_id, made.join.generation = "run", 1
    return made


def report() -> control_pb2.Report:
    made = control_pb2.Report(
        steps=3, wall_s=1.0, metrics_json='{"test": {"loss": 0.5}}', free_from=["", "x"]
    )
    for direction in ("sent", "received"):
        made.ledger.add(**asdict(Entry("p0", "splitnn", "embedding", direction, 1, 2, 3)))
    made.tcp.add(peer="p0", sent_bytes=1, received_bytes=2)
    made.interfaces.add(interface="eth0", sent_bytes=1, received_bytes=2)
    made.exchanges_json = "[]"
    return made


def said() -> list[control_pb2.PartyMessage]:
    """What a party says, a message of each kind."""
    plan = control_pb2.Plan()
    plan.aggregations.add(phase="splitnn", rounds=3).tensors.add(name="w", dtype=1, shape=[2])
    progress = control_pb2.Progress(
        phase="splitnn", round=1, rounds=3, steps=2, metrics={"loss": 0.5}, note="collapsing"
    )
    return [
        join_of("p0"),
        join_of("p1"),
        claim_of("p1"),
        control_pb2.PartyMessage(plan=plan),
        control_pb2.PartyMessage(plan=control_pb2.Plan()),
        control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat()),
        control_pb2.PartyMessage(progress=progress),
        control_pb2.PartyMessage(report=report()),
        control_pb2.PartyMessage(
            abort=failure_pb2.Failure(code=failure_pb2.NON_FINITE, message="z", party="p1")
        ),
        control_pb2.PartyMessage(alone=control_pb2.Alone()),
        control_pb2.PartyMessage(stopping=control_pb2.Stopping()),
    ]


def told() -> list[control_pb2.ServerMessage]:
    """What a server says."""
    start = control_pb2.Start(
        run_id="run", generation=1, exchange_address="127.0.0.1:7001", left=["p2"]
    )
    return [
        control_pb2.ServerMessage(waiting=control_pb2.Waiting(missing=["p1"], deadline_s=5.0)),
        control_pb2.ServerMessage(start=start),
        control_pb2.ServerMessage(
            start=control_pb2.Start(run_id="run", generation=1, goes_on=True)
        ),
        control_pb2.ServerMessage(
            interrupt=control_pb2.Interrupt(generation=1, lost=["p1"], reason="p1 was lost")
        ),
        control_pb2.ServerMessage(
            stop=failure_pb2.Failure(code=failure_pb2.PARTY_LOST, message="gone", party="p1")
        ),
        control_pb2.ServerMessage(complete=control_pb2.Complete(run_id="run", summary_json="{}")),
    ]


def sent(step: StepKey) -> list[exchange_pb2.Frame]:
    """What a party sends after it has attached: a bundle in some frames; and two frames that it may
    not send.
    """
    frames = [exchange_pb2.Frame.FromString(each.data) for each in encode(step, BUNDLE, 12)]
    failure = failure_pb2.Failure(code=failure_pb2.INTERNAL, message="z", party="p1")
    return [
        *frames,
        exchange_pb2.Frame(failure=failure),
        exchange_pb2.Frame(resume=exchange_pb2.Resume(frames=2)),
    ]


def attach(generation: int) -> exchange_pb2.Frame:
    made = exchange_pb2.Frame()
    made.attach.run_id, made.attach.generation, made.attach.protocol = "run", generation, PROTOCOL
    return made


SAID, TOLD, SENT = said(), told(), sent(STEP)


def bundle_with_faults(frames: Sequence[exchange_pb2.Frame], chance: Random) -> list[bytes]:
    """Returns a bundle's frames, of which one is mutated, one perhaps missing, and one perhaps in
    another's place.
    """
    made = [frame.SerializeToString() for frame in frames[:-2]]
    made[chance.randrange(len(made))] = mutated(chance.choice(frames), chance)
    if chance.random() < 0.2:
        made.pop(chance.randrange(len(made)))
    if chance.random() < 0.2:
        made.append(chance.choice(made))
    if chance.random() < 0.1:
        chance.shuffle(made)
    return made


# -- what comes of them


class Outcomes:
    """Counts what came of the cases; ``defects`` has a traceback or a sentence of each that may not
    be.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.defects: list[str] = []

    def add(self, target: str, how: str, times: int = 1) -> None:
        self.counts[target, how] += times

    def of(self, target: str) -> int:
        return sum(count for (name, _), count in self.counts.items() if name == target)

    @contextmanager
    def judged(self, target: str, fine: str) -> Iterator[None]:
        """Counts what comes of the block: ``fine``, or the code of its error; another exception is
        a defect.
        """
        how = fine
        try:
            try:
                yield
            except VflError as error:
                how = error.code.name
                to_failure(error).SerializeToString()
                if isinstance(error, InternalError):
                    raise
        except Exception:  # noqa: BLE001 - that is what is looked for
            how = "DEFECT"
            self.defects.append(f"{target}: {traceback.format_exc()}")
        self.add(target, how)


def take_frames(outcomes: Outcomes, chance: Random) -> None:
    """Takes one bundle in, as a hub does."""
    taken: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return memoryview(bytearray(nbytes))

    assembly: Assembly | None = None
    for data in bundle_with_faults(SENT, chance):
        with outcomes.judged("frames", "taken"):
            frame = parse_frame(data, party="p1")
            if frame.envelope.HasField("header"):
                # Without knowing what to expect.
                with_any = chance.random() < 0.1
                if with_any:
                    parse_header(frame.envelope.header, "p1")
                assembly = Assembly(frame, SPEC, party="p1", allocate=allocate)
            if assembly is None:
                raise PeerError(
                    Code.MALFORMED_MESSAGE, "a frame that belongs to no bundle", party="p1"
                )
            assembly.feed(frame)
    if sum(taken) > 8 * SPEC.payload_bytes:
        outcomes.defects.append(f"frames: {sum(taken)} bytes taken")


def shown(event: str, **facts: Any) -> None:
    """Words an event as both kinds of console do."""
    to_json({"event": event, **facts})
    _describe_event("vfl-server", event, facts)


def coordinator(*, restarted: bool = False) -> Coordinator:
    """``restarted``: in the generation in which an earlier process has died."""

    def ignore(*_: object) -> None: ...

    run = ServedRun(RECIPE, "train", "run", generation=int(restarted), under_way=restarted)
    return Coordinator(run, RunHooks(shown, on_start=ignore, on_plan=ignore))


def joined(run: Coordinator) -> dict[str, Member]:
    members = {name: run.open(name) for name in ROSTER}
    join = claim_of if run.generation else join_of
    for name, member in members.items():
        run.handle(member, join(name))
    return members


def hear_parties(outcomes: Outcomes, chance: Random) -> None:
    """Lets a server hear mutated messages, before a run or in it, and makes the summary if the run
    completes.
    """
    run = coordinator(restarted=chance.random() < 0.3)
    members = joined(run) if chance.random() < 0.8 else {name: run.open(name) for name in ROSTER}
    for _ in range(chance.choice((0, 1, 6))):
        name = chance.choice(ROSTER)
        with outcomes.judged("party messages", "taken"):
            run.handle(members[name], _parse(mutated(chance.choice(SAID), chance), name))
    closing, teller = control_pb2.PartyMessage(report=report()), chance.choice(ROSTER)
    for name in ROSTER:
        with outcomes.judged("party messages", "taken"):
            data = mutated(closing, chance) if name == teller else closing.SerializeToString()
            run.handle(members[name], _parse(data, name))
    run.tick()
    run.status()
    for member in members.values():
        while not member.outbox.empty():
            message = member.outbox.get()
            if message is not None:
                message.SerializeToString()
    if run.state is RunState.COMPLETED:
        with outcomes.judged("summaries", "made"):
            summarise(
                RECIPE, "train", run, RunFolder(Path("nowhere"), "run"), Ledger(), TcpMeter()
            ).model_dump_json()


class _Silent:
    """A channel to nobody."""

    def close(self) -> None: ...


class _Hearing(Session):
    """A party's session whose server says what a test gives it, and then ends the session."""

    heard: Sequence[bytes] = ()

    def _connect(self, give_up_s: float) -> None:
        if not self.heard:
            raise InputError(Code.UNREACHABLE, "the server has gone")
        messages, self.heard = self.heard, ()
        channel: Any = _Silent()
        call: Any = iter(messages)
        self._uplink.channel = channel
        self._uplink.read(call, channel)


P1 = keyring("p1")
JOINING = Joining("passive", RECIPE.canonical_json(), "train", 7, "cpu")


def hear(heard: list[bytes]) -> object:
    """Lets a party hear messages of a server while it joins. Returns what its joining returns;
    raises VflError.
    """
    waiting: Callable[[list[str], float, str], None] = lambda missing, left_s, why: shown(  # noqa: E731
        "waiting", missing=missing, left_s=left_s, why=why
    )
    session = _Hearing(
        "", P1, "server", Ledger(), TcpMeter(), heartbeat_s=60.0, wait_s=1.0, on_waiting=waiting
    )
    session.heard = heard
    try:
        with patch.object(sessions, "PAUSE_S", 0.0):
            return session.join(JOINING)
    finally:
        session._uplink.closed.set()


def hear_server(outcomes: Outcomes, chance: Random) -> None:
    """Lets a party hear mutated messages while it joins."""
    heard = [mutated(chance.choice(TOLD), chance) for _ in range(4)]
    with outcomes.judged("server messages", "Start"):
        if isinstance(hear(heard), Done):
            outcomes.add("server messages", "Done")
            outcomes.add("server messages", "Start", -1)
    outcomes.add("server messages", "(of the same session)", len(heard) - 1)


# -- live services


class _Errors(logging.Handler):
    """Notes what a thread of a service logs as an error."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(logging.ERROR)
        self._outcomes = outcomes

    def emit(self, record: logging.LogRecord) -> None:
        self._outcomes.defects.append(f"log: {logging.Formatter().format(record)}")


@contextmanager
def _watched(outcomes: Outcomes) -> Iterator[None]:
    """Notes errors in the log, and exceptions that end a thread, while the block runs."""
    handler, hook = _Errors(outcomes), threading.excepthook

    def ended(args: threading.ExceptHookArgs) -> None:
        trace = "".join(
            traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        )
        outcomes.defects.append(f"thread: {trace}")

    logging.getLogger().addHandler(handler)
    threading.excepthook = ended
    try:
        yield
    finally:
        threading.excepthook = hook
        logging.getLogger().removeHandler(handler)


def _ask(
    outcomes: Outcomes,
    target: str,
    method: Any,
    messages: Sequence[bytes],
    ending: Callable[[bytes], str],
) -> None:
    """Sends messages over a stream of their own, and counts how the stream ends."""
    how = "closed"
    try:
        for reply in method(iter(messages), timeout=CALL_S):
            how = ending(reply)
    except grpc.RpcError as error:
        how = f"gRPC: {error.code().name}"
        outcomes.defects.append(f"{target}: {how}")
    outcomes.add(target, how)


def _swap_ended(data: bytes) -> str:
    frame = exchange_pb2.Frame.FromString(data)
    return Code(frame.failure.code).name if frame.HasField("failure") else "answered"


def _session_ended(data: bytes) -> str:
    message = control_pb2.ServerMessage.FromString(data)
    return (
        Code(message.stop.code).name
        if message.HasField("stop")
        else str(message.WhichOneof("body"))
    )


def live_exchange(outcomes: Outcomes, chance: Random, streams: int) -> None:
    """Opens streams to an active party's exchange, which collects all the time; an honest one is
    served at the end.
    """
    found = GrpcExchange(["p1"], CALL_S, attach_timeout_s=0.05)
    step, over = StepKey("train", 0, 0), threading.Event()

    def serve() -> None:
        nonlocal step
        generation = 1
        while not over.is_set():
            try:
                found.hub.collect(step, SPEC)
                found.hub.reply(step, {"p1": Bundle(Kind.ACK)})
                step = StepKey("train", 0, (step.batch + 1) % 1_000)
            except VflError as error:
                # As a party whose run ends, and that is started again.
                found.hub.end(error)
                generation += 1
                if not over.is_set():
                    found.begin(generation)

    serving = threading.Thread(target=serve, name="serving")
    serving.start()
    try:
        with _watched(outcomes), dial(found.address, credentials("p1"), ACTIVE) as channel:
            method = channel.stream_stream("/vfl.v1.Exchange/Swap")
            for _ in range(streams):
                first = attach(found.hub.pipe.generation)
                if chance.random() < 0.1:
                    first.attach.resume.phase, first.attach.resume.batch = step.phase, step.batch
                hello = (
                    mutated(first, chance) if chance.random() < 0.2 else first.SerializeToString()
                )
                _ask(
                    outcomes,
                    "exchange",
                    method,
                    [hello, *bundle_with_faults(sent(step), chance)],
                    _swap_ended,
                )
            # The hub that the last stream ended may be the one that this stream attaches to.
            for _ in range(5):
                honest = [attach(found.hub.pipe.generation), *sent(step)[:-2]]
                before = outcomes.counts["honest", "answered"]
                _ask(
                    outcomes,
                    "honest",
                    method,
                    [each.SerializeToString() for each in honest],
                    _swap_ended,
                )
                if outcomes.counts["honest", "answered"] > before:
                    break
            else:
                outcomes.defects.append("exchange: an honest party is not served any more")
    finally:
        over.set()
        found.hub.end(PeerError(Code.MALFORMED_MESSAGE, "the test is over"))
        serving.join()
        found.close()


def live_control(outcomes: Outcomes, chance: Random, streams: int) -> None:
    """Opens sessions with a server; the last message of each is none, so that the server ends
    it.
    """
    service = ControlService(coordinator(), keyring("server"), Ledger(), TcpMeter())
    with run_server("127.0.0.1:0", keyring("server"), [service], 3 * len(ROSTER) + 4) as (
        _,
        address,
    ):
        channels = {name: dial(address, credentials(name), "server") for name in ROSTER}
        with _watched(outcomes):
            for number in range(streams):
                name = ROSTER[number % len(ROSTER)]
                if service._coordinator.state in (RunState.FAILED, RunState.COMPLETED):
                    service._coordinator = coordinator()
                first = [join_of(name).SerializeToString()] if chance.random() < 0.7 else []
                messages = [
                    *first,
                    *(mutated(chance.choice(SAID), chance) for _ in range(3)),
                    b"\xff",
                ]
                method = channels[name].stream_stream(f"/{SERVICE}/Session")
                _ask(outcomes, "control", method, messages, _session_ended)
        for channel in channels.values():
            channel.close()


CODECS = {"frames": take_frames, "party messages": hear_parties, "server messages": hear_server}
LIVE = {"exchange": live_exchange, "control": live_control}
