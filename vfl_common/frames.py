"""Converts bundles to serialised frames of about 2 MiB, and back, without torch and sockets.

A bundle is encoded before a stream is used, because an exception inside gRPC's request iterator
reaches the caller as UNKNOWN. The receiver checks the announcement (``BundleHeader``) before it
allocates memory for the bytes.

Tensor data is copied only once in each direction. The generated protobuf code, which would copy it
two or three times more, writes and reads only a frame's envelope: everything except ``data``, the
last field.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from vfl_common.bundle import (
    CONTROL,
    LABELS,
    Buffer,
    Bundle,
    BundleSpec,
    DType,
    Kind,
    StepKey,
    TensorSpec,
)
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import exchange_pb2, tensor_pb2

# The maximum number of bytes of tensor data in a frame. The envelope of a frame takes less than 1
# KiB for up to some tens of tensors. Smaller frames are slower, because each frame passes through
# several threads: with 1 MiB, split training with tensors of 4 MiB is 2 % slower.
FRAME_BYTES = 2 << 20
MAX_TENSORS = 4096
MAX_RANK = 8
# The maximum length of a phase's name.
MAX_PHASE = 100

# The protobuf tags (field number and wire type in one byte) of the fields of ``Frame`` that a
# bundle uses.
_STEP_TAG, _HEADER_TAG, _LAST_TAG, _DATA_TAG = 2 << 3 | 2, 3 << 3 | 2, 4 << 3, 6 << 3 | 2

Allocate = Callable[[int], memoryview]


class Encoded(NamedTuple):
    """A serialised frame, with the facts that the ledger records."""

    data: bytes
    # The number of bytes of tensor data in ``data``.
    payload_bytes: int
    phase: str
    kind: str


class Received(NamedTuple):
    """A received frame. ``data``: a view of the tensor data in the bytes from gRPC."""

    # The parsed frame. Its field ``data`` is empty if the frame has the layout that ``encode``
    # writes.
    envelope: exchange_pb2.Frame
    data: memoryview


class BundleSizes(NamedTuple):
    """The size of a bundle on the wire, as the ledger counts it."""

    payload_bytes: int
    message_bytes: int
    messages: int


def encode(step: StepKey, bundle: Bundle, frame_bytes: int = FRAME_BYTES) -> list[Encoded]:
    """Serialises a bundle. Returns at least one frame."""
    chunks = _split_into_chunks(bundle, frame_bytes) or [[]]
    header = _make_header(
        bundle.kind, tuple((name, t.dtype, t.shape) for name, t in bundle.tensors.items())
    )
    frames: list[Encoded] = []
    for index, pieces in enumerate(chunks):
        nbytes = sum(piece.nbytes for piece in pieces)
        envelope = _make_envelope(step, header, index, len(chunks)).SerializeToString()
        data = b"".join((envelope, _data_prefix(nbytes), *pieces))
        frames.append(Encoded(data, nbytes, step.phase, LABELS[bundle.kind]))
    return frames


def sizes(step: StepKey, spec: BundleSpec, frame_bytes: int = FRAME_BYTES) -> BundleSizes:
    """Returns the size on the wire of a bundle of ``spec``, to forecast traffic."""
    return _compute_sizes(step, _make_spec_header(spec), spec.payload_bytes, frame_bytes)


def measure_bundle(step: StepKey, bundle: Bundle, frame_bytes: int = FRAME_BYTES) -> BundleSizes:
    """Returns the size on the wire of ``bundle``.

    The encoded size of a step's numbers depends only on their bit lengths, so most steps of a phase
    have the same size, which is cached.
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
    return _compute_sizes(step, _make_header(kind, tensors), payload, frame_bytes)


def _compute_sizes(
    step: StepKey, header: tensor_pb2.BundleHeader, payload: int, frame_bytes: int
) -> BundleSizes:
    count = max(1, -(-payload // frame_bytes))
    chunks = [frame_bytes] * (count - 1) + [payload - (count - 1) * frame_bytes]
    envelope_sizes = (
        _make_envelope(step, header, index, count).ByteSize() + len(_data_prefix(chunk))
        for index, chunk in enumerate(chunks)
    )
    return BundleSizes(payload, payload + sum(envelope_sizes), count)


def encode_passed(now: StepKey) -> Encoded:
    """Returns the frame that tells a party that its step has passed. ``now``: the current step."""
    frame = exchange_pb2.Frame()
    frame.passed.phase, frame.passed.round, frame.passed.batch = now
    return Encoded(frame.SerializeToString(), 0, CONTROL, CONTROL)


# The result is cached, because the frames of a phase have few different sizes.
@lru_cache(maxsize=256)
def _data_prefix(nbytes: int) -> bytes:
    """Returns the tag and the length of ``Frame.data``, as protobuf writes them; b"" for empty
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


def _make_envelope(
    step: StepKey, header: tensor_pb2.BundleHeader, index: int, count: int
) -> exchange_pb2.Frame:
    """Returns frame ``index`` of the ``count`` frames of a bundle, without its data."""
    frame = exchange_pb2.Frame(last=index == count - 1)
    if index == 0:
        frame.step.phase, frame.step.round, frame.step.batch = step
        frame.header.CopyFrom(header)
    return frame


@lru_cache(maxsize=256)
def _make_header(
    kind: Kind, tensors: tuple[tuple[str, DType, tuple[int, ...]], ...]
) -> tensor_pb2.BundleHeader:
    """Returns the announcement of a bundle. It is cached, because most steps of a phase have the
    same announcement.
    """
    header = tensor_pb2.BundleHeader(kind=int(kind))  # type: ignore[arg-type]
    for name, dtype, shape in tensors:
        header.tensors.add(name=name, dtype=int(dtype), shape=shape)
    return header


@lru_cache(maxsize=256)
def _make_spec_header(spec: BundleSpec) -> tensor_pb2.BundleHeader:
    """Returns the announcement of a bundle of ``spec``."""
    return _make_header(
        spec.kind, tuple((name, t.dtype, t.shape) for name, t in spec.tensors.items())
    )


@lru_cache(maxsize=256)
def _encode_header(spec: BundleSpec) -> bytes:
    """Returns the serialised announcement of a bundle of ``spec``."""
    return _make_spec_header(spec).SerializeToString()


def _split_into_chunks(bundle: Bundle, size: int) -> list[list[memoryview]]:
    """Splits the concatenation of all buffers into chunks of ``size`` bytes. Each chunk is a list
    of views.
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
    """Parses one message of a stream. Raises PeerError (MALFORMED_MESSAGE) if ``data`` is not a
    Frame.
    """
    data_range = _find_data(data)
    try:
        if data_range is None:
            frame = exchange_pb2.Frame.FromString(data)
            received = Received(frame, memoryview(frame.data))
        else:
            received = Received(
                exchange_pb2.Frame.FromString(data[: data_range[0]]),
                memoryview(data)[data_range[1] :],
            )
    except DecodeError:
        raise make_message_error(f"{party} sent bytes that are not a frame", party) from None
    for phase in (received.envelope.step.phase, received.envelope.passed.phase):
        if len(phase) > MAX_PHASE:
            raise make_message_error(
                f"{party} sent a frame whose phase has a name of {len(phase)} characters", party
            )
        if not phase.isprintable():
            raise make_message_error(
                f"{party} sent a frame whose phase has a name with control characters", party
            )
    return received


def _find_data(frame: bytes) -> tuple[int, int] | None:
    """Returns (end of the envelope, begin of the data) in ``frame``; None if ``frame`` does not
    have the layout that ``encode`` writes.

    ``encode`` writes the fields ``step``, ``header`` and ``last``, or some of them, then ``data``
    to the end. The generated protobuf code checks the content of these fields. If the result is
    None, because the frame has no data or other code wrote it, the generated code must parse the
    whole frame, which takes more copies and gives the same result.
    """
    position, size = 0, len(frame)
    try:
        for _ in range(4):
            tag = frame[position]
            if tag == _LAST_TAG and frame[position + 1] < 0x80:
                position += 2
                continue
            length, start = frame[position + 1], position + 2
            if length > 0x7F:
                length, shift = length & 0x7F, 7
                # A length of four bytes can be up to 256 MiB, which is more than gRPC accepts.
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
                return (position, start) if start + length == size else None
            if tag not in (_STEP_TAG, _HEADER_TAG):
                return None
            position = start + length
    except IndexError:
        # The frame ends before its data begins.
        pass
    return None


def get_step(frame: exchange_pb2.Frame) -> StepKey:
    """Returns the step in the first frame of a bundle."""
    return StepKey(frame.step.phase, frame.step.round, frame.step.batch)


def get_kind_label(frame: exchange_pb2.Frame) -> str:
    """Returns the ledger's name for the kind of a bundle, given its first frame."""
    return LABELS.get(frame.header.kind, "unknown")


def make_message_error(message: str, party: str) -> PeerError:
    """Returns the error for a message that is not valid."""
    return PeerError(Code.MALFORMED_MESSAGE, message, party=party)


class Assembly:
    """Assembles one bundle. Create it with the bundle's first frame, then call ``feed`` with all
    frames in order, including the first.

    Args:
        first: The bundle's first frame.
        expect: The spec that the bundle must match.
        party: The sender of the bundle, for messages.
        allocate: Returns a writable buffer of the given size in bytes, in pinned memory if the
            device is a GPU.

    Raises:
        PeerError: The announcement is malformed or does not match ``expect``. No memory was
            allocated then.
    """

    def __init__(
        self, first: Received, expect: BundleSpec, *, party: str, allocate: Allocate | None = None
    ) -> None:
        header = first.envelope.header
        self.step = get_step(first.envelope)
        self._party = party
        specs = expect.tensors
        # If the announcement differs, ``check`` finds the difference and raises an error.
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
        self._unfilled = [
            buffer.data for buffer in self._bundle.tensors.values() if buffer.data.nbytes
        ]

    def feed(self, frame: Received) -> Bundle | None:
        """Adds the next frame. Returns the bundle after the last frame, otherwise None."""
        data, last = frame.data, frame.envelope.last
        # The fast path: one tensor in one frame.
        if last and len(self._unfilled) == 1 and data.nbytes == self._unfilled[0].nbytes:
            self._unfilled[0][:] = data
            return self._bundle
        while data.nbytes:
            if not self._unfilled:
                raise PeerError(
                    Code.TENSOR_TOO_LARGE,
                    f"{self._party} at {self.step}: sent more bytes than announced",
                    party=self._party,
                )
            room = self._unfilled[0]
            num_bytes = min(room.nbytes, data.nbytes)
            room[:num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
            if num_bytes == room.nbytes:
                self._unfilled.pop(0)
            else:
                self._unfilled[0] = room[num_bytes:]
        if not last:
            return None
        if self._unfilled:
            raise make_message_error(
                f"{self._party} at {self.step}: sent fewer bytes than announced", self._party
            )
        return self._bundle


def parse_header(header: tensor_pb2.BundleHeader, party: str) -> tuple[Kind, dict[str, TensorSpec]]:
    """Returns the kind and the specs of the tensors that a header announces. Raises PeerError
    (MALFORMED_MESSAGE).
    """
    if len(header.tensors) > MAX_TENSORS:
        raise make_message_error(
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
        raise make_message_error(
            f"{party} announced a bundle of an unknown kind or dtype", party
        ) from None
    if len(specs) < len(header.tensors):
        raise make_message_error(f"{party} announced two tensors of the same name", party)
    if any(len(spec.shape) > MAX_RANK for spec in specs.values()):
        raise make_message_error(
            f"{party} announced a tensor of more than {MAX_RANK} dimensions", party
        )
    return kind, specs


def _allocate(nbytes: int) -> memoryview:
    """Allocates memory without clearing it. A bytearray would be cleared first, which takes a third
    of the time of the copy.

    Its earlier contents are never visible, because a bundle is passed on only when all of its bytes
    have arrived.
    """
    return np.empty(nbytes, dtype=np.uint8).data
