from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    FLOAT16: _ClassVar[DType]
    BFLOAT16: _ClassVar[DType]
    INT64: _ClassVar[DType]
    INT32: _ClassVar[DType]
    UINT8: _ClassVar[DType]
    BOOL: _ClassVar[DType]

class BundleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUNDLE_KIND_UNSPECIFIED: _ClassVar[BundleKind]
    EMBEDDING: _ClassVar[BundleKind]
    GRADIENT: _ClassVar[BundleKind]
    WEIGHTS: _ClassVar[BundleKind]
    ROWS: _ClassVar[BundleKind]
    VERDICT: _ClassVar[BundleKind]
    ACK: _ClassVar[BundleKind]
DTYPE_UNSPECIFIED: DType
FLOAT32: DType
FLOAT16: DType
BFLOAT16: DType
INT64: DType
INT32: DType
UINT8: DType
BOOL: DType
BUNDLE_KIND_UNSPECIFIED: BundleKind
EMBEDDING: BundleKind
GRADIENT: BundleKind
WEIGHTS: BundleKind
ROWS: BundleKind
VERDICT: BundleKind
ACK: BundleKind

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class BundleHeader(_message.Message):
    __slots__ = ("kind", "tensors")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    kind: BundleKind
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    def __init__(self, kind: _Optional[_Union[BundleKind, str]] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ...) -> None: ...
