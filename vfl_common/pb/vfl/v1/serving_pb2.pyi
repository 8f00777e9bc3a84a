from vfl_common.pb.vfl.v1 import failure_pb2 as _failure_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromParty(_message.Message):
    __slots__ = ("present", "answer")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    present: Present
    answer: Answer
    def __init__(self, present: _Optional[_Union[Present, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class FromActive(_message.Message):
    __slots__ = ("welcome", "question", "failure")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    question: Question
    failure: _failure_pb2.Failure
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class Present(_message.Message):
    __slots__ = ("run_id", "recipe_digest", "protocol", "keeping", "program")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RECIPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    KEEPING_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    recipe_digest: str
    protocol: int
    keeping: Keeping
    program: str
    def __init__(self, run_id: _Optional[str] = ..., recipe_digest: _Optional[str] = ..., protocol: _Optional[int] = ..., keeping: _Optional[_Union[Keeping, _Mapping]] = ..., program: _Optional[str] = ...) -> None: ...

class Keeping(_message.Message):
    __slots__ = ("seconds", "features")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    features: str
    def __init__(self, seconds: _Optional[float] = ..., features: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Question(_message.Message):
    __slots__ = ("number", "ids", "left_ms", "step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    ids: _containers.RepeatedScalarFieldContainer[str]
    left_ms: int
    step: Step
    def __init__(self, number: _Optional[int] = ..., ids: _Optional[_Iterable[str]] = ..., left_ms: _Optional[int] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("first", "asked")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    first: int
    asked: bytes
    def __init__(self, first: _Optional[int] = ..., asked: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "state", "embeddings", "features", "failure", "answered")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: bytes
    embeddings: bytes
    features: str
    failure: _failure_pb2.Failure
    answered: bytes
    def __init__(self, number: _Optional[int] = ..., state: _Optional[bytes] = ..., embeddings: _Optional[bytes] = ..., features: _Optional[str] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., answered: _Optional[bytes] = ...) -> None: ...
