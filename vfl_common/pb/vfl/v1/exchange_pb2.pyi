from vfl_common.pb.vfl.v1 import control_pb2 as _control_pb2
from vfl_common.pb.vfl.v1 import failure_pb2 as _failure_pb2
from vfl_common.pb.vfl.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Heads(_message.Message):
    __slots__ = ("note", "certificates", "held_origin", "held_size", "proof", "cosigned", "failure", "proof_signature", "also", "proofs")
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    HELD_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    HELD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    COSIGNED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROOF_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    note: str
    certificates: bytes
    held_origin: str
    held_size: int
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    cosigned: str
    failure: _failure_pb2.Failure
    proof_signature: bytes
    also: _containers.RepeatedScalarFieldContainer[int]
    proofs: _containers.RepeatedCompositeFieldContainer[HeadProof]
    def __init__(self, note: _Optional[str] = ..., certificates: _Optional[bytes] = ..., held_origin: _Optional[str] = ..., held_size: _Optional[int] = ..., proof: _Optional[_Iterable[bytes]] = ..., cosigned: _Optional[str] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., proof_signature: _Optional[bytes] = ..., also: _Optional[_Iterable[int]] = ..., proofs: _Optional[_Iterable[_Union[HeadProof, _Mapping]]] = ...) -> None: ...

class HeadProof(_message.Message):
    __slots__ = ("hashes", "signature")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StepKey(_message.Message):
    __slots__ = ("phase", "round", "batch")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    phase: str
    round: int
    batch: int
    def __init__(self, phase: _Optional[str] = ..., round: _Optional[int] = ..., batch: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("run_id", "generation", "protocol", "resume")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    protocol: int
    resume: StepKey
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., protocol: _Optional[int] = ..., resume: _Optional[_Union[StepKey, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("frames", "whole")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    frames: int
    whole: bool
    def __init__(self, frames: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("attach", "step", "header", "last", "failure", "data", "resume", "passed")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    step: StepKey
    header: _tensor_pb2.BundleHeader
    last: bool
    failure: _failure_pb2.Failure
    data: bytes
    resume: Resume
    passed: StepKey
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., step: _Optional[_Union[StepKey, _Mapping]] = ..., header: _Optional[_Union[_tensor_pb2.BundleHeader, _Mapping]] = ..., last: _Optional[bool] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., data: _Optional[bytes] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., passed: _Optional[_Union[StepKey, _Mapping]] = ...) -> None: ...
