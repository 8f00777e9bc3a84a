"""Bundles to serialised frames of about 2 MiB, and back.

A bundle is encoded before a stream is used, because an exception inside gRPC's request iterator
reaches the caller as UNKNOWN. The receiver checks the announcement (``BundleHeader``) before it
allocates memory for the bytes.

Tensor data is copied once in each direction. The generated protobuf code writes and reads only a
frame's envelope, which is everything except ``data``, the last field: it copies data two or three
times more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from vfl_common.bundle import LABELS, Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.errors import Code, PeerError
from vfl_common.ledger import CONTROL
from vfl_common.pb.vfl.v1 import exchange_pb2, tensor_pb2

# The bytes of tensor data in a frame; its envelope takes less than 1 KiB for up to some tens of
# tensors. With 1 MiB, split training with tensors of 4 MiB is 2 % slower, because each frame passes
# through several threads.
FRAME_BYTES = 2 << 20
MAX_TENSORS = 4096
MAX_RANK = 8
# The most characters of a phase's name.
MAX_PHASE = 100

# Tags (field number and wire type, one byte each) of the fields of ``Frame`` that a bundle uses.
_STEP_TAG, _HEADER_TAG, _LAST_TAG, _DATA_TAG = 2 << 3 | 2, 3 << 3 | 2, 4 << 3, 6 << 3 | 2

Allocate = Callable[[int], memoryview]


class Encoded(NamedTuple):
    """One serialised frame, with the facts that the ledger records."""

    data: bytes
    # The bytes of tensor data in ``data``.
    payload_bytes: int
    phase: str
    kind: str


class Received(NamedTuple):
    """One received frame; ``data`` is a view of the bytes from gRPC."""

    # Without ``data`` if the frame has the layout of ``encode``.
    envelope: exchange_pb2.Frame
    data: memoryview


class BundleSizes(NamedTuple):
    """The size of one bundle on the wire, as the ledger counts it."""

    payload_bytes: int
    message_bytes: int
    messages: int


def encode(step: StepKey, bundle: Bundle, frame_bytes: int = FRAME_BYTES) -> list[Encoded]:
    """Returns the bundle's serialised frames, at least one."""
    chunks = _chunks(bundle, frame_bytes) or [[]]
    header = _header(
        bundle.kind, tuple((name, t.dtype, t.shape) for name, t in bundle.tensors.items())
    )
    frames: list[Encoded] = []
    for index, pieces in enumerate(chunks):
        nbytes = sum(piece.nbytes for piece in pieces)
        envelope = _frame(step, header, index, len(chunks)).SerializeToString()
        data = b"".join((envelope, _data_prefix(nbytes), *pieces))
        frames.append(Encoded(data, nbytes, step.phase, LABELS[bundle.kind]))
    return frames


def sizes(step: StepKey, spec: BundleSpec, frame_bytes: int = FRAME_BYTES) -> BundleSizes:
    """Returns the size on the wire of a bundle of ``spec``, for a forecast."""
    return _sizes(step, _spec_header(spec), spec.payload_bytes, frame_bytes)


def measure(step: StepKey, bundle: Bundle, frame_bytes: int = FRAME_BYTES) -> BundleSizes:
    """Returns the size on the wire of ``bundle``.

    The bytes of a number depend only on its bit length, so most steps of a phase have the same
    size, which is cached.
    """
    tensors = tuple((name, t.dtype, t.shape) for name, t in bundle.tensors.items())
    payload = sum(tensor.data.nbytes for tensor in bundle.tensors.values())
    bits = step.round.bit_length(), step.batch.bit_length()
    return _measure(step.phase, *bits, bundle.kind, tensors, payload, frame_bytes)


@lru_cache(maxsize=1024)
def _measure(
    phase: str,
    round_bits: int,
    batch_bits: int,
    kind: Kind,
    tensors: tuple[tuple[str, DType, tuple[int, ...]], ...],
    payload: int,
    frame_bytes: int,
) -> BundleSizes:
    step = StepKey(phase, (1 << round_bits) - 1, (1 << batch_bits) - 1)
    return _sizes(step, _header(kind, tensors), payload, frame_bytes)


def _sizes(
    step: StepKey, header: tensor_pb2.BundleHeader, payload: int, frame_bytes: int
) -> BundleSizes:
    count = max(1, -(-payload // frame_bytes))
    chunks = [frame_bytes] * (count - 1) + [payload - (count - 1) * frame_bytes]
    around = (
        _frame(step, header, index, count).ByteSize() + len(_data_prefix(chunk))
        for index, chunk in enumerate(chunks)
    )
    return BundleSizes(payload, payload + sum(around), count)


def encode_passed(now: StepKey) -> Encoded:
    """Returns the frame that tells a party that its step has passed, and the current step."""
    frame = exchange_pb2.Frame()
    frame.passed.phase, frame.passed.round, frame.passed.batch = now
    return Encoded(frame.SerializeToString(), 0, CONTROL, CONTROL)


# Cached, because the frames of a phase have few different sizes.
@lru_cache(maxsize=256)
def _data_prefix(nbytes: int) -> bytes:
    """Returns the tag and the length of ``Frame.data``, as protobuf writes them; nothing for empty
    data.
    """
    if not nbytes:
        return b""
    length = bytearray()
    while nbytes > 0x7F:
        length.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    length.append(nbytes)
    return bytes((_DATA_TAG, *length))


def _frame(
    step: StepKey, header: tensor_pb2.BundleHeader, index: int, count: int
) -> exchange_pb2.Frame:
    """Returns frame ``index`` of the ``count`` frames of a bundle, without its data."""
    frame = exchange_pb2.Frame(last=index == count - 1)
    if index == 0:
        frame.step.phase, frame.step.round, frame.step.batch = step
        frame.header.CopyFrom(header)
    return frame


@lru_cache(maxsize=256)
def _header(
    kind: Kind, tensors: tuple[tuple[str, DType, tuple[int, ...]], ...]
) -> tensor_pb2.BundleHeader:
    """Returns the announcement of a bundle, which is the same in every step of a phase, except for
    the last batch.
    """
    header = tensor_pb2.BundleHeader(kind=int(kind))  # type: ignore[arg-type]
    for name, dtype, shape in tensors:
        header.tensors.add(name=name, dtype=int(dtype), shape=shape)
    return header


@lru_cache(maxsize=256)
def _spec_header(spec: BundleSpec) -> tensor_pb2.BundleHeader:
    """Returns the announcement of a bundle of ``spec``."""
    return _header(spec.kind, tuple((name, t.dtype, t.shape) for name, t in spec.tensors.items()))


@lru_cache(maxsize=256)
def _encode_header(spec: BundleSpec) -> bytes:
    """Returns the serialised announcement of a bundle of ``spec``."""
    return _spec_header(spec).SerializeToString()


def _chunks(bundle: Bundle, size: int) -> list[list[memoryview]]:
    """Cuts the concatenation of all buffers into chunks of ``size`` bytes; each chunk is a list of
    views.
    """
    chunks: list[list[memoryview]] = []
    room = 0
    for buffer in bundle.tensors.values():
        view = buffer.data.cast("B") if buffer.data.nbytes else memoryview(b"")
        while view.nbytes:
            if room == 0:
                chunks.append([])
                room = size
            piece = view[:room]
            chunks[-1].append(piece)
            room -= piece.nbytes
            view = view[piece.nbytes :]
    return chunks


def parse_frame(data: bytes, *, party: str) -> Received:
    """Reads one message of a stream. Raises PeerError (MALFORMED_MESSAGE) if ``data`` is not a
    Frame.
    """
    at = _data_at(data)
    try:
        if at is None:
            frame = exchange_pb2.Frame.FromString(data)
            received = Received(frame, memoryview(frame.data))
        else:
            received = Received(
                exchange_pb2.Frame.FromString(data[: at[0]]), memoryview(data)[at[1] :]
            )
    except DecodeError:
        raise message_error(f"{party} sent bytes that are not a frame", party) from None
    for phase in (received.envelope.step.phase, received.envelope.passed.phase):
        if len(phase) > MAX_PHASE:
            raise message_error(
                f"{party} sent a frame whose phase has a name of {len(phase)} characters", party
            )
        if not phase.isprintable():
            raise message_error(
                f"{party} sent a frame whose phase has a name with control characters", party
            )
    return received


def _data_at(frame: bytes) -> tuple[int, int] | None:
    """Returns where the envelope of ``frame`` ends and where its data begins, if it has the layout
    of ``encode``.

    ``encode`` writes at most three of the fields ``step``, ``header`` and ``last``, then ``data``
    to the end. The generated code checks the content of these fields. None means that the generated
    code must read the whole frame, because it has no data, or other code wrote it; that takes more
    copies and gives the same message.
    """
    at, size = 0, len(frame)
    try:
        for _ in range(4):
            tag = frame[at]
            if tag == _LAST_TAG and frame[at + 1] < 0x80:
                at += 2
                continue
            length, start = frame[at + 1], at + 2
            if length > 0x7F:
                length, shift = length & 0x7F, 7
                # Four bytes hold 256 MiB, more than gRPC lets through.
                while shift <= 21:
                    byte = frame[start]
                    start += 1
                    length |= (byte & 0x7F) << shift
                    shift += 7
                    if byte < 0x80:
                        break
                else:
                    return None
            if tag == _DATA_TAG:
                return (at, start) if start + length == size else None
            if tag not in (_STEP_TAG, _HEADER_TAG):
                return None
            at = start + length
    except IndexError:
        # The frame ends before its data begins.
        pass
    return None


def step_of(frame: exchange_pb2.Frame) -> StepKey:
    """Returns the step that a first frame names."""
    return StepKey(frame.step.phase, frame.step.round, frame.step.batch)


def label(frame: exchange_pb2.Frame) -> str:
    """Returns the ledger's name for the kind of bundle that a first frame announces."""
    return LABELS.get(frame.header.kind, "unknown")


def message_error(message: str, party: str) -> PeerError:
    """Returns the error of a message that cannot be read."""
    return PeerError(Code.MALFORMED_MESSAGE, message, party=party)


class Assembly:
    """Assembles one bundle: created with its first frame, then fed all of its frames in order.

    Args:
        first: the bundle's first frame.
        expect: the spec that the bundle must match.
        party: its sender, for messages.
        allocate: returns a writable buffer of the given bytes; pinned memory if the device is a
            GPU.

    Raises:
        PeerError: the announcement is malformed or does not match ``expect``; no memory has been
            allocated then.
    """

    def __init__(
        self, first: Received, expect: BundleSpec, *, party: str, allocate: Allocate | None = None
    ) -> None:
        header = first.envelope.header
        self.step = step_of(first.envelope)
        self._party = party
        specs = expect.tensors
        # If the announcement differs, ``check`` finds the difference.
        if header.SerializeToString() != _encode_header(expect):
            kind, specs = parse_header(header, party)
            expect.check(kind, specs, party=party, step=self.step)
        allocate = allocate or _allocate
        self._bundle = Bundle(
            expect.kind,
            {
                name: Buffer(spec.dtype, spec.shape, allocate(spec.nbytes))
                for name, spec in specs.items()
            },
        )
        self._free = [buffer.data for buffer in self._bundle.tensors.values() if buffer.data.nbytes]

    def feed(self, frame: Received) -> Bundle | None:
        """Takes the next frame; returns the bundle after the last one."""
        data, last = frame.data, frame.envelope.last
        # The fast path: one tensor in one frame.
        if last and len(self._free) == 1 and data.nbytes == self._free[0].nbytes:
            self._free[0][:] = data
            return self._bundle
        while data.nbytes:
            if not self._free:
                raise PeerError(
                    Code.TENSOR_TOO_LARGE,
                    f"{self._party} at {self.step}: sent more bytes than announced",
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
        if not last:
            return None
        if self._free:
            raise message_error(
                f"{self._party} at {self.step}: sent fewer bytes than announced", self._party
            )
        return self._bundle


def parse_header(header: tensor_pb2.BundleHeader, party: str) -> tuple[Kind, dict[str, TensorSpec]]:
    """Returns the kind and specs that a header announces. Raises PeerError (MALFORMED_MESSAGE)."""
    if len(header.tensors) > MAX_TENSORS:
        raise message_error(
            f"{party} announced more than {MAX_TENSORS} tensors (got {len(header.tensors)})",
            party,
        )
    try:
        kind = Kind(header.kind)
        specs = {
            tensor.name: TensorSpec(DType(tensor.dtype), tuple(tensor.shape[: MAX_RANK + 1]))
            for tensor in header.tensors
        }
    except ValueError:
        raise message_error(
            f"{party} announced a bundle of an unknown kind or dtype", party
        ) from None
    if len(specs) < len(header.tensors):
        raise message_error(f"{party} announced two tensors of the same name", party)
    if any(len(spec.shape) > MAX_RANK for spec in specs.values()):
        raise message_error(f"{party} announced a tensor of more than {MAX_RANK} dimensions", party)
    return kind, specs


def _allocate(nbytes: int) -> memoryview:
    """Allocates memory without clearing it; a bytearray is zeroed first, which takes a third of the
    time of the copy.

    Its earlier contents are never visible, because a bundle is passed on only when all of its bytes
    have arrived.
    """
    return np.empty(nbytes, dtype=np.uint8).data
