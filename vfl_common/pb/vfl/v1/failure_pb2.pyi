from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    INTERNAL: _ClassVar[FailureCode]
    CONFIG_INVALID: _ClassVar[FailureCode]
    FILE_INVALID: _ClassVar[FailureCode]
    DATA_INVALID: _ClassVar[FailureCode]
    ROWS_DIFFER: _ClassVar[FailureCode]
    CERTIFICATE_INVALID: _ClassVar[FailureCode]
    IDENTITY_MISMATCH: _ClassVar[FailureCode]
    NOT_IN_RECIPE: _ClassVar[FailureCode]
    NAME_TAKEN: _ClassVar[FailureCode]
    ROLE_MISMATCH: _ClassVar[FailureCode]
    RECIPE_DIFFERS: _ClassVar[FailureCode]
    PROTOCOL_DIFFERS: _ClassVar[FailureCode]
    ADDRESS_IN_USE: _ClassVar[FailureCode]
    UNREACHABLE: _ClassVar[FailureCode]
    TENSOR_MISMATCH: _ClassVar[FailureCode]
    TENSOR_TOO_LARGE: _ClassVar[FailureCode]
    NON_FINITE: _ClassVar[FailureCode]
    STEP_OUT_OF_ORDER: _ClassVar[FailureCode]
    STALE_GENERATION: _ClassVar[FailureCode]
    MODEL_INVALID: _ClassVar[FailureCode]
    DEVICE_MISSING: _ClassVar[FailureCode]
    PARTY_LOST: _ClassVar[FailureCode]
    STEP_TIMEOUT: _ClassVar[FailureCode]
    ABORTED: _ClassVar[FailureCode]
    INTERRUPTED: _ClassVar[FailureCode]
    CHECKPOINT_INVALID: _ClassVar[FailureCode]
    MALFORMED_MESSAGE: _ClassVar[FailureCode]
    MODELS_DIFFER: _ClassVar[FailureCode]
    REFUSED: _ClassVar[FailureCode]
    PLUGINS_DIFFER: _ClassVar[FailureCode]
    ADDRESS_INVALID: _ClassVar[FailureCode]
FAILURE_CODE_UNSPECIFIED: FailureCode
INTERNAL: FailureCode
CONFIG_INVALID: FailureCode
FILE_INVALID: FailureCode
DATA_INVALID: FailureCode
ROWS_DIFFER: FailureCode
CERTIFICATE_INVALID: FailureCode
IDENTITY_MISMATCH: FailureCode
NOT_IN_RECIPE: FailureCode
NAME_TAKEN: FailureCode
ROLE_MISMATCH: FailureCode
RECIPE_DIFFERS: FailureCode
PROTOCOL_DIFFERS: FailureCode
ADDRESS_IN_USE: FailureCode
UNREACHABLE: FailureCode
TENSOR_MISMATCH: FailureCode
TENSOR_TOO_LARGE: FailureCode
NON_FINITE: FailureCode
STEP_OUT_OF_ORDER: FailureCode
STALE_GENERATION: FailureCode
MODEL_INVALID: FailureCode
DEVICE_MISSING: FailureCode
PARTY_LOST: FailureCode
STEP_TIMEOUT: FailureCode
ABORTED: FailureCode
INTERRUPTED: FailureCode
CHECKPOINT_INVALID: FailureCode
MALFORMED_MESSAGE: FailureCode
MODELS_DIFFER: FailureCode
REFUSED: FailureCode
PLUGINS_DIFFER: FailureCode
ADDRESS_INVALID: FailureCode

class Failure(_message.Message):
    __slots__ = ("code", "message", "party")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    message: str
    party: str
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ..., party: _Optional[str] = ...) -> None: ...
