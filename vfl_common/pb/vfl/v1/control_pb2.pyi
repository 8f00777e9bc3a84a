from vfl_common.pb.vfl.v1 import failure_pb2 as _failure_pb2
from vfl_common.pb.vfl.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PartyMessage(_message.Message):
    __slots__ = ("join", "heartbeat", "progress", "report", "abort", "alone", "plan", "stopping", "lenient")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    heartbeat: Heartbeat
    progress: Progress
    report: Report
    abort: _failure_pb2.Failure
    alone: Alone
    plan: Plan
    stopping: Stopping
    lenient: Lenient
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., abort: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., alone: _Optional[_Union[Alone, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., lenient: _Optional[_Union[Lenient, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("waiting", "start", "interrupt", "stop", "complete")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    waiting: Waiting
    start: Start
    interrupt: Interrupt
    stop: _failure_pb2.Failure
    complete: Complete
    def __init__(self, waiting: _Optional[_Union[Waiting, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., interrupt: _Optional[_Union[Interrupt, _Mapping]] = ..., stop: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("role", "protocol", "recipe_json", "job", "run_id", "checkpoints", "exchange_address", "pid", "device", "device_name", "generation", "plugins", "held", "unfit", "filled_json", "written", "oldest", "version", "shown_json")
    class PluginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RECIPE_JSON_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    FILLED_JSON_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHOWN_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    protocol: int
    recipe_json: str
    job: str
    run_id: str
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    exchange_address: str
    pid: int
    device: str
    device_name: str
    generation: int
    plugins: _containers.ScalarMap[str, str]
    held: _containers.RepeatedScalarFieldContainer[str]
    unfit: str
    filled_json: str
    written: _containers.RepeatedScalarFieldContainer[str]
    oldest: int
    version: str
    shown_json: str
    def __init__(self, role: _Optional[str] = ..., protocol: _Optional[int] = ..., recipe_json: _Optional[str] = ..., job: _Optional[str] = ..., run_id: _Optional[str] = ..., checkpoints: _Optional[_Iterable[str]] = ..., exchange_address: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., device_name: _Optional[str] = ..., generation: _Optional[int] = ..., plugins: _Optional[_Mapping[str, str]] = ..., held: _Optional[_Iterable[str]] = ..., unfit: _Optional[str] = ..., filled_json: _Optional[str] = ..., written: _Optional[_Iterable[str]] = ..., oldest: _Optional[int] = ..., version: _Optional[str] = ..., shown_json: _Optional[str] = ...) -> None: ...

class Aggregation(_message.Message):
    __slots__ = ("phase", "rounds", "tensors", "passive", "up", "down", "draw")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PASSIVE_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    DRAW_FIELD_NUMBER: _ClassVar[int]
    phase: str
    rounds: int
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorHeader]
    passive: bool
    up: Coding
    down: Coding
    draw: Draw
    def __init__(self, phase: _Optional[str] = ..., rounds: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorHeader, _Mapping]]] = ..., passive: _Optional[bool] = ..., up: _Optional[_Union[Coding, _Mapping]] = ..., down: _Optional[_Union[Coding, _Mapping]] = ..., draw: _Optional[_Union[Draw, _Mapping]] = ...) -> None: ...

class Draw(_message.Message):
    __slots__ = ("number", "rounds", "seed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    number: int
    rounds: int
    seed: int
    def __init__(self, number: _Optional[int] = ..., rounds: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Coding(_message.Message):
    __slots__ = ("name", "bits", "stochastic", "seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    STOCHASTIC_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    bits: int
    stochastic: bool
    seed: int
    def __init__(self, name: _Optional[str] = ..., bits: _Optional[int] = ..., stochastic: _Optional[bool] = ..., seed: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("aggregations",)
    AGGREGATIONS_FIELD_NUMBER: _ClassVar[int]
    aggregations: _containers.RepeatedCompositeFieldContainer[Aggregation]
    def __init__(self, aggregations: _Optional[_Iterable[_Union[Aggregation, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stopping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lenient(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "round", "rounds", "steps", "metrics", "batch", "batches", "note")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    round: int
    rounds: int
    steps: int
    metrics: _containers.ScalarMap[str, float]
    batch: int
    batches: int
    note: str
    def __init__(self, phase: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., steps: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., batch: _Optional[int] = ..., batches: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("peer", "phase", "kind", "direction", "payload_bytes", "message_bytes", "messages")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    phase: str
    kind: str
    direction: str
    payload_bytes: int
    message_bytes: int
    messages: int
    def __init__(self, peer: _Optional[str] = ..., phase: _Optional[str] = ..., kind: _Optional[str] = ..., direction: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., message_bytes: _Optional[int] = ..., messages: _Optional[int] = ...) -> None: ...

class TcpCount(_message.Message):
    __slots__ = ("peer", "sent_bytes", "received_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    sent_bytes: int
    received_bytes: int
    def __init__(self, peer: _Optional[str] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("ledger", "tcp", "metrics_json", "steps", "wall_s", "privacy_json", "free_from", "interfaces", "without", "peak_memory_bytes", "exchanges_json", "absences_json", "skipped_rounds", "rows", "common_rows", "times_json", "returns", "follows_preset", "worth_json", "arithmetic_json")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_JSON_FIELD_NUMBER: _ClassVar[int]
    FREE_FROM_FIELD_NUMBER: _ClassVar[int]
    INTERFACES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_JSON_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_JSON_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMMON_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMES_JSON_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_PRESET_FIELD_NUMBER: _ClassVar[int]
    WORTH_JSON_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_JSON_FIELD_NUMBER: _ClassVar[int]
    ledger: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    tcp: _containers.RepeatedCompositeFieldContainer[TcpCount]
    metrics_json: str
    steps: int
    wall_s: float
    privacy_json: str
    free_from: _containers.RepeatedScalarFieldContainer[str]
    interfaces: _containers.RepeatedCompositeFieldContainer[InterfaceCount]
    without: _containers.RepeatedScalarFieldContainer[str]
    peak_memory_bytes: int
    exchanges_json: str
    absences_json: str
    skipped_rounds: int
    rows: int
    common_rows: int
    times_json: str
    returns: int
    follows_preset: bool
    worth_json: str
    arithmetic_json: str
    def __init__(self, ledger: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., tcp: _Optional[_Iterable[_Union[TcpCount, _Mapping]]] = ..., metrics_json: _Optional[str] = ..., steps: _Optional[int] = ..., wall_s: _Optional[float] = ..., privacy_json: _Optional[str] = ..., free_from: _Optional[_Iterable[str]] = ..., interfaces: _Optional[_Iterable[_Union[InterfaceCount, _Mapping]]] = ..., without: _Optional[_Iterable[str]] = ..., peak_memory_bytes: _Optional[int] = ..., exchanges_json: _Optional[str] = ..., absences_json: _Optional[str] = ..., skipped_rounds: _Optional[int] = ..., rows: _Optional[int] = ..., common_rows: _Optional[int] = ..., times_json: _Optional[str] = ..., returns: _Optional[int] = ..., follows_preset: _Optional[bool] = ..., worth_json: _Optional[str] = ..., arithmetic_json: _Optional[str] = ...) -> None: ...

class InterfaceCount(_message.Message):
    __slots__ = ("interface", "sent_bytes", "received_bytes")
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    interface: str
    sent_bytes: int
    received_bytes: int
    def __init__(self, interface: _Optional[str] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("missing", "deadline_s", "refused")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    refused: _containers.RepeatedCompositeFieldContainer[_failure_pb2.Failure]
    def __init__(self, missing: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., refused: _Optional[_Iterable[_Union[_failure_pb2.Failure, _Mapping]]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("run_id", "generation", "checkpoint", "exchange_address", "left", "returning", "goes_on", "anew", "protocol", "shown")
    class ShownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RETURNING_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    checkpoint: str
    exchange_address: str
    left: _containers.RepeatedScalarFieldContainer[str]
    returning: bool
    goes_on: bool
    anew: str
    protocol: int
    shown: _containers.ScalarMap[str, str]
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., checkpoint: _Optional[str] = ..., exchange_address: _Optional[str] = ..., left: _Optional[_Iterable[str]] = ..., returning: _Optional[bool] = ..., goes_on: _Optional[bool] = ..., anew: _Optional[str] = ..., protocol: _Optional[int] = ..., shown: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Interrupt(_message.Message):
    __slots__ = ("generation", "lost", "reason", "leaving")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    generation: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    leaving: bool
    def __init__(self, generation: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("summary_json", "run_id")
    SUMMARY_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    summary_json: str
    run_id: str
    def __init__(self, summary_json: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...
