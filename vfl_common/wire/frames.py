"""Bundles to serialised frames of about 1 MiB, and back.

A bundle is encoded before a stream is touched: an exception inside gRPC's request iterator would reach the caller as
UNKNOWN. The receiver checks the announcement (``BundleHeader``) before it takes memory for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import exchange_pb2, tensor_pb2

FRAME_BYTES = 1 << 20  # of tensor data; the envelope of a frame is below 1 KiB for up to some tens of tensors
MAX_TENSORS = 4096
MAX_RANK = 8
MAX_PHASE = 100  # characters of a phase's name

Allocate = Callable[[int], memoryview]


class Encoded(NamedTuple):
    """One serialised frame, with what the ledger says of it."""

    data: bytes
    payload_bytes: int  # of ``len(data)``, how many are tensor data
    phase: str
    kind: str


class Sizes(NamedTuple):
    """What one bundle comes to on the wire, as the ledger counts it."""

    payload_bytes: int
    message_bytes: int
    messages: int


def encode(step: StepKey, bundle: Bundle, frame_bytes: int = FRAME_BYTES) -> list[Encoded]:
    """The bundle's serialised frames, at least one."""
    frames: list[Encoded] = []
    chunks = list(_chunks(bundle, frame_bytes)) or [b""]
    header = _header(bundle.kind, tuple((name, each.dtype, each.shape) for name, each in bundle.tensors.items()))
    for index, chunk in enumerate(chunks):
        frame = _frame(step, header, index, len(chunks), chunk)
        frames.append(Encoded(frame.SerializeToString(), len(chunk), step.phase, _LABELS[bundle.kind]))
    return frames


def sizes(step: StepKey, spec: BundleSpec, frame_bytes: int = FRAME_BYTES) -> Sizes:
    """What ``encode`` would make of a bundle of ``spec``, without its bytes: for a forecast."""
    payload = spec.payload_bytes
    count = max(1, -(-payload // frame_bytes))
    chunks = [frame_bytes] * (count - 1) + [payload - (count - 1) * frame_bytes]
    messages = (_envelope(step, spec, index, count) + _field(nbytes) for index, nbytes in enumerate(chunks))
    return Sizes(payload, sum(messages), count)


def _envelope(step: StepKey, spec: BundleSpec, index: int, count: int) -> int:
    """Bytes of frame ``index`` of ``count`` without its data."""
    return _frame(step, _spec_header(spec), index, count).ByteSize()


def _field(nbytes: int) -> int:
    """Bytes of ``Frame.data`` with so many bytes in it: tag, length, content; nothing where it is empty."""
    return 1 + -(-nbytes.bit_length() // 7) + nbytes if nbytes else 0


def _frame(
    step: StepKey, header: tensor_pb2.BundleHeader, index: int, count: int, data: bytes = b""
) -> exchange_pb2.Frame:
    """Frame ``index`` of the ``count`` of a bundle."""
    frame = exchange_pb2.Frame(data=data, last=index == count - 1)
    if index == 0:
        frame.step.phase, frame.step.round, frame.step.batch = step
        frame.header.CopyFrom(header)
    return frame


@lru_cache(maxsize=256)
def _header(kind: Kind, tensors: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> tensor_pb2.BundleHeader:
    """The announcement of such a bundle: the same in every step of a phase but for its last batch."""
    header = tensor_pb2.BundleHeader(kind=int(kind))  # type: ignore[arg-type]
    for name, dtype, shape in tensors:
        header.tensors.add(name=name, dtype=int(dtype), shape=shape)
    return header


@lru_cache(maxsize=256)
def _spec_header(spec: BundleSpec) -> tensor_pb2.BundleHeader:
    """The announcement of exactly what ``spec`` expects."""
    return _header(spec.kind, tuple((name, each.dtype, each.shape) for name, each in spec.tensors.items()))


@lru_cache(maxsize=256)
def _expected_header(spec: BundleSpec) -> bytes:
    """The same, serialised."""
    return _spec_header(spec).SerializeToString()


def _chunks(bundle: Bundle, size: int) -> Iterator[bytes]:
    """The concatenation of all buffers, cut into pieces of ``size`` bytes."""
    pieces: list[memoryview] = []
    room = size
    for buffer in bundle.tensors.values():
        view = buffer.data.cast("B") if buffer.data.nbytes else memoryview(b"")
        while view.nbytes:
            pieces.append(view[:room])
            room -= pieces[-1].nbytes
            view = view[pieces[-1].nbytes :]
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], size
    if pieces:
        yield b"".join(pieces)


def parse_frame(data: bytes, *, party: str) -> exchange_pb2.Frame:
    """Raises PeerError (MALFORMED_MESSAGE) where ``data`` is not a Frame."""
    try:
        frame = exchange_pb2.Frame.FromString(data)
    except DecodeError:
        raise malformed(f"{party} sent bytes that are not a frame", party) from None
    if len(frame.step.phase) > MAX_PHASE:
        raise malformed(f"{party} sent a frame whose phase has a name of {len(frame.step.phase)} characters", party)
    return frame


def step_of(frame: exchange_pb2.Frame) -> StepKey:
    return StepKey(frame.step.phase, frame.step.round, frame.step.batch)


_LABELS: dict[int, str] = {kind.value: kind.label for kind in Kind}


def label(frame: exchange_pb2.Frame) -> str:
    """The ledger's word for the bundle that a first frame announces."""
    return _LABELS.get(frame.header.kind, "unknown")


def malformed(message: str, party: str) -> PeerError:
    return PeerError(Code.MALFORMED_MESSAGE, message, public=message, party=party)


class Assembly:
    """One bundle on its way in: made from its first frame, fed all of them in order.

    Args:
        first: the bundle's first frame.
        expect: what the bundle must be.
        party: its sender, for messages.
        allocate: gives a writable buffer of so many bytes; pinned memory where the device is a GPU.

    Raises:
        PeerError: the announcement is malformed, or is not what ``expect`` says. No memory has been taken then.
    """

    def __init__(
        self, first: exchange_pb2.Frame, expect: BundleSpec, *, party: str, allocate: Allocate | None = None
    ) -> None:
        self.step = step_of(first)
        self._party = party
        specs = expect.tensors
        if first.header.SerializeToString() != _expected_header(expect):  # find out what is wrong with it
            kind, specs = announced(first.header, party)
            expect.check(kind, specs, party=party, step=self.step)
        allocate = allocate or _allocate
        self._bundle = Bundle(
            expect.kind, {name: Buffer(spec.dtype, spec.shape, allocate(spec.nbytes)) for name, spec in specs.items()}
        )
        self._free = [buffer.data for buffer in self._bundle.tensors.values() if buffer.data.nbytes]

    def feed(self, frame: exchange_pb2.Frame) -> Bundle | None:
        """Takes the next frame; returns the bundle after the last one."""
        data = memoryview(frame.data)
        if frame.last and len(self._free) == 1 and data.nbytes == self._free[0].nbytes:  # one tensor in one frame
            self._free[0][:] = data
            return self._bundle
        while data.nbytes:
            if not self._free:
                raise PeerError(
                    Code.TENSOR_TOO_LARGE,
                    f"{self._party} at {self.step}: more bytes than announced",
                    public="more bytes than announced",
                    party=self._party,
                )
            room = self._free[0]
            n = min(room.nbytes, data.nbytes)
            room[:n] = data[:n]
            data = data[n:]
            if n == room.nbytes:
                self._free.pop(0)
            else:
                self._free[0] = room[n:]
        if not frame.last:
            return None
        if self._free:
            raise malformed(f"{self._party} at {self.step}: fewer bytes than announced", self._party)
        return self._bundle


def announced(header: tensor_pb2.BundleHeader, party: str) -> tuple[Kind, dict[str, TensorSpec]]:
    """The kind and specs that a header announces. Raises PeerError (MALFORMED_MESSAGE)."""
    if len(header.tensors) > MAX_TENSORS:
        raise malformed(f"{party} announced {len(header.tensors)} tensors; at most {MAX_TENSORS} may come", party)
    try:
        kind = Kind(header.kind)
        specs = {
            tensor.name: TensorSpec(DType(tensor.dtype), tuple(tensor.shape[: MAX_RANK + 1]))
            for tensor in header.tensors
        }
    except ValueError:
        raise malformed(f"{party} announced a bundle of an unknown kind or dtype", party) from None
    if len(specs) < len(header.tensors):
        raise malformed(f"{party} announced two tensors of one name", party)
    if any(len(spec.shape) > MAX_RANK for spec in specs.values()):
        raise malformed(f"{party} announced a tensor of more than {MAX_RANK} dimensions", party)
    return kind, specs


def _allocate(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
