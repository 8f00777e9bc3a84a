"""The schema, the words for it in Python, and frames: what crosses, and what may not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.bundle import (
    ITEM_BYTES,
    Buffer,
    Bundle,
    BundleSpec,
    DType,
    Kind,
    StepKey,
    TensorSpec,
)
from vfl_common.errors import CATALOGUE, Code, PeerError
from vfl_common.frames import (
    FRAME_BYTES,
    MAX_PHASE,
    Assembly,
    encode,
    get_step,
    parse_frame,
    parse_header,
    sizes,
)
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2, failure_pb2, tensor_pb2
from vfl_common.rpc.messages import EMPTY_MESSAGES, PARTY_MESSAGES

STEP = StepKey("train", 2, 7)


# -- one list of names and numbers in each place


@pytest.mark.parametrize(
    ("ours", "schema"),
    [(Code, failure_pb2.FailureCode), (DType, tensor_pb2.DType), (Kind, tensor_pb2.BundleKind)],
    ids=["codes", "dtypes", "kinds"],
)
def test_the_schema_and_python_have_the_same_names_and_numbers(
    ours: type[Code | DType | Kind], schema: object
) -> None:
    theirs = {name: number for name, number in schema.items() if number != 0}  # type: ignore[attr-defined]
    assert {member.name: member.value for member in ours} == theirs


def test_zero_is_nothing_in_every_enumeration() -> None:
    for schema in (failure_pb2.FailureCode, tensor_pb2.DType, tensor_pb2.BundleKind):
        assert schema.Name(0).endswith("_UNSPECIFIED")


def test_every_code_is_in_the_catalogue() -> None:
    assert set(CATALOGUE) == set(Code)
    assert all(entry.public and entry.exit_code in (1, 2, 3, 4) for entry in CATALOGUE.values())
    assert len({entry.public for entry in CATALOGUE.values()}) == len(Code)


def test_every_dtype_has_a_size() -> None:
    assert set(ITEM_BYTES) == set(DType)


# -- frames

names = st.text(max_size=12).filter(lambda name: name.isprintable() or "\n" in name)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
steps = st.builds(
    StepKey,
    st.text("abc-_", min_size=1, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    tensors = {}
    for name in draw(st.lists(names, unique=True, max_size=5)):
        dtype, shape = draw(st.sampled_from(DType)), draw(shapes)
        size = math.prod(shape) * ITEM_BYTES[dtype]
        tensors[name] = Buffer(
            dtype, shape, memoryview(draw(st.binary(min_size=size, max_size=size)))
        )
    return Bundle(draw(st.sampled_from(Kind)), tensors)


def spec_of(bundle: Bundle) -> BundleSpec:
    return BundleSpec(
        bundle.kind, {name: TensorSpec(b.dtype, b.shape) for name, b in bundle.tensors.items()}
    )


def assemble(frames: list[bytes], expect: BundleSpec) -> Bundle | None:
    first, *rest = (parse_frame(data, party="north") for data in frames)
    assembly = Assembly(first, expect, party="north")
    bundle = assembly.feed(first)
    for frame in rest:
        assert bundle is None
        bundle = assembly.feed(frame)
    return bundle


@given(steps, bundles(), st.integers(1, 40))
def test_what_is_encoded_is_assembled(step: StepKey, bundle: Bundle, frame_bytes: int) -> None:
    encoded = encode(step, bundle, frame_bytes)
    assert len(encoded) == max(1, math.ceil(bundle.payload_bytes / frame_bytes))
    assert (
        sum(frame.payload_bytes for frame in encoded)
        == bundle.payload_bytes
        == spec_of(bundle).payload_bytes
    )
    assert {(frame.phase, frame.kind) for frame in encoded} == {(step.phase, bundle.kind.label)}
    first = parse_frame(encoded[0].data, party="north")
    assert get_step(first.envelope) == step
    got = present(assemble([frame.data for frame in encoded], spec_of(bundle)))
    assert got.kind is bundle.kind
    assert list(got.tensors) == list(bundle.tensors)
    for name, buffer in bundle.tensors.items():
        assert (got.tensors[name].dtype, got.tensors[name].shape) == (buffer.dtype, buffer.shape)
        assert got.tensors[name].data == buffer.data
        assert not got.tensors[name].data.readonly


def generated(step: StepKey, bundle: Bundle, frame_bytes: int) -> list[bytes]:
    """Writes the bundle's frames with the generated code alone."""
    payload = b"".join(bytes(buffer.data) for buffer in bundle.tensors.values())
    starts = range(0, len(payload), frame_bytes) or range(1)
    found = []
    for start in starts:
        frame = exchange_pb2.Frame(
            data=payload[start : start + frame_bytes], last=start == starts[-1]
        )
        if start == 0:
            frame.step.phase, frame.step.round, frame.step.batch = step
            frame.header.kind = int(bundle.kind)  # type: ignore[assignment]
            for name, buffer in bundle.tensors.items():
                frame.header.tensors.add(name=name, dtype=int(buffer.dtype), shape=buffer.shape)
        found.append(frame.SerializeToString())
    return found


@given(steps, bundles(), st.integers(1, 40))
def test_frames_are_what_the_generated_code_writes(
    step: StepKey, bundle: Bundle, frame_bytes: int
) -> None:
    assert [frame.data for frame in encode(step, bundle, frame_bytes)] == generated(
        step, bundle, frame_bytes
    )


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        127,
        128,
        16_383,
        16_384,
        FRAME_BYTES - 1,
        FRAME_BYTES,
        FRAME_BYTES + 1,
        2 * FRAME_BYTES,
        3_000_000,
    ],
)
@pytest.mark.parametrize("tensors", [1, 3])
def test_frames_of_any_length_are_what_the_generated_code_writes(nbytes: int, tensors: int) -> None:
    """Tries the bounds of a frame, and the lengths whose varint takes one byte more."""
    data = memoryview(np.random.default_rng(nbytes).bytes(nbytes))
    cuts = [nbytes * part // tensors for part in range(tensors + 1)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    bundle = Bundle(
        Kind.WEIGHTS,
        {f"w{n}": Buffer(DType.UINT8, (piece.nbytes,), piece) for n, piece in enumerate(pieces)},
    )
    encoded = [frame.data for frame in encode(STEP, bundle)]
    assert encoded == generated(STEP, bundle, FRAME_BYTES)
    got = present(assemble(encoded, spec_of(bundle)))
    assert b"".join(buffer.data for buffer in got.tensors.values()) == data


def test_what_was_encoded_may_be_changed_afterwards() -> None:
    memory = bytearray(b"before")
    bundle = Bundle(Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (6,), memoryview(memory))})
    encoded = [frame.data for frame in encode(STEP, bundle, 4)]
    memory[:] = b"after!"
    got = present(assemble(encoded, spec_of(bundle)))
    assert got.tensors["w"].data == b"before"


@given(steps, bundles(), st.integers(1, 300))
def test_the_data_of_our_own_frames_is_not_copied(
    step: StepKey, bundle: Bundle, frame_bytes: int
) -> None:
    for frame in encode(step, bundle, frame_bytes):
        received = parse_frame(frame.data, party="north")
        assert received.data.nbytes == frame.payload_bytes
        assert received.data.obj is frame.data or frame.payload_bytes == 0
        assert received.envelope.data == b""


def varint(value: int, padding: int = 0) -> bytes:
    """Writes ``value`` in ``padding`` bytes more than it takes."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    if padding:
        return bytes([*found, value | 0x80, *[0x80] * (padding - 1), 0])
    return bytes([*found, value])


def delimited(number: int) -> st.SearchStrategy[bytes]:
    """Draws a field with a length, which may be wrong, and content that may be no message."""
    tag = varint(number << 3 | 2)
    content = st.one_of(st.binary(max_size=140), st.just(b""), st.just(b"\x0a\x01a\x10\x05"))
    wrong = st.sampled_from([0, 0, 0, 0, 0, 1, -1, 1 << 20, 1 << 28, 1 << 31, 1 << 35])
    return st.builds(
        lambda data, off, padding: tag + varint(max(0, len(data) + off), padding) + data,
        content,
        wrong,
        st.integers(0, 4),
    )


fields = st.one_of(
    delimited(1),
    delimited(2),
    delimited(3),
    delimited(5),
    delimited(6),
    delimited(6),
    delimited(7),
    # One that is not known.
    delimited(15),
    delimited(1000),
    st.builds(
        lambda value, padding: b"\x20" + varint(value, padding),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2),
    ),
    st.sampled_from(
        [b"\x20\x01", b"\x20\x00", b"\x20", b"\x32", b"\x33", b"\x34", b"\x31", b"\x35", b"\x00"]
    ),
    st.binary(max_size=6),
)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.lists(fields, max_size=7).map(b"".join), st.integers(0, 8))
def test_any_bytes_are_the_frame_that_the_generated_code_reads(data: bytes, cut: int) -> None:
    """Mixes fields out of order, repeated, unknown, of wrong lengths and truncated."""
    data = data[: len(data) - cut] if cut < 8 else data
    try:
        want = exchange_pb2.Frame.FromString(data)
    except DecodeError:
        want = None
    if want is None or len(want.step.phase) > MAX_PHASE or not want.step.phase.isprintable():
        with raises(PeerError, Code.MALFORMED_MESSAGE, party="north"):
            parse_frame(data, party="north")
        return
    got = parse_frame(data, party="north")
    assert got.data == want.data
    for each in (got.envelope, want):
        each.ClearField("data")
    assert got.envelope == want
    assert got.envelope.SerializeToString(deterministic=True) == want.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (b"\x20\x01\x32\x02ab", b"ab"),
        # Out of order.
        (b"\x32\x02ab\x20\x01", b"ab"),
        # The last of two counts.
        (b"\x32\x02ab\x20\x01\x32\x01c", b"c"),
        # A length of more bytes than it takes.
        (b"\x20\x01\x32\x82\x80\x00ab", b"ab"),
        # A tag of more bytes than it takes.
        (b"\x20\x01\xb2\x00\x02ab", b"ab"),
        (b"\x20\x81\x00\x32\x02ab", b"ab"),
        (b"\x20\x01" * 50 + b"\x32\x02ab", b"ab"),
        # A field that is not known.
        (b"\x7a\x01x\x20\x01\x32\x02ab", b"ab"),
        (b"\x20\x01", b""),
        (b"\x20\x01\x32\x00", b""),
    ],
)
def test_a_frame_that_other_code_wrote_is_read_alike(frame: bytes, data: bytes) -> None:
    got = parse_frame(frame, party="north")
    assert (got.data, got.envelope.last) == (data, True)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x32",
        b"\x32\x03ab",
        b"\x32\x80",
        b"\x20",
        b"\x12\x05a",
        b"\x32\x02abc",
        b"\x1a\x01",
        b"\x32\xff\xff\xff\xff\x0f",
    ],
)
def test_a_frame_that_ends_too_soon_is_malformed(frame: bytes) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="north"):
        parse_frame(frame, party="north")


def test_a_phase_with_a_long_name_is_malformed() -> None:
    data = encode(StepKey("p" * (MAX_PHASE + 1), 0, 0), Bundle(Kind.ACK))[0].data
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("north", "101")):
        parse_frame(data, party="north")


@pytest.mark.parametrize("character", ["\n", "\x1b", "\x9b", "\u202e"])
def test_a_phase_whose_name_would_move_a_cursor_is_malformed(character: str) -> None:
    data = encode(StepKey(f"train{character}", 0, 0), Bundle(Kind.ACK))[0].data
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="north"):
        parse_frame(data, party="north")


@given(steps, bundles(), st.integers(1, 40))
def test_sizes_are_known_without_the_bytes(step: StepKey, bundle: Bundle, frame_bytes: int) -> None:
    encoded = encode(step, bundle, frame_bytes)
    want = (bundle.payload_bytes, sum(len(frame.data) for frame in encoded), len(encoded))
    assert sizes(step, spec_of(bundle), frame_bytes) == want


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 4095, 4096, 4097, 12288, 14000])
def test_sizes_of_large_bundles(rows: int) -> None:
    """Frames of their usual size: 4096 rows of 64 numbers fill one."""
    data = memoryview(bytearray(rows * 64 * 4))
    bundle = Bundle(Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, (rows, 64), data)})
    encoded = encode(STEP, bundle)
    want = (rows * 256, sum(len(frame.data) for frame in encoded), len(encoded))
    assert sizes(STEP, spec_of(bundle)) == want


@given(steps, bundles(), st.integers(1, 40), st.data())
def test_an_assembly_takes_a_bundle_only_whole(
    step: StepKey, bundle: Bundle, frame_bytes: int, data: st.DataObject
) -> None:
    """Whatever frame is lost, the end is PeerError or no bundle, never a bundle with holes."""
    frames = [frame.data for frame in encode(step, bundle, frame_bytes)]
    # Of many drawn bundles one frame is enough; without its first frame there is no assembly.
    if len(frames) == 1:
        return
    lost = data.draw(st.integers(1, len(frames) - 1))
    rest = frames[:lost] + frames[lost + 1 :]
    if lost == len(frames) - 1:
        assert assemble(rest, spec_of(bundle)) is None
    else:
        with raises(PeerError, Code.MALFORMED_MESSAGE):
            assemble(rest, spec_of(bundle))


EXPECTED = BundleSpec(Kind.EMBEDDING, {"z": TensorSpec(DType.FLOAT32, (2, 3))})
GOOD = encode(
    STEP, Bundle(Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, (2, 3), memoryview(bytes(24)))}), 10
)


def refusal(messages: list[bytes]) -> PeerError | None:
    """Takes one bundle in, as a hub does; what it is refused with, if it is."""
    assembly: Assembly | None = None
    try:
        for data in messages:
            frame = parse_frame(data, party="north")
            if frame.envelope.HasField("header"):
                assembly = Assembly(frame, EXPECTED, party="north")
            if assembly is not None and assembly.feed(frame) is not None:
                return None
    except PeerError as error:
        return error
    return None


REASONS = (Code.MALFORMED_MESSAGE, Code.TENSOR_MISMATCH, Code.TENSOR_TOO_LARGE)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_raise_nothing_but_peer_error(messages: list[bytes]) -> None:
    for prefix in ([], [GOOD[0].data]):
        error = refusal(prefix + messages)
        assert error is None or (error.party == "north" and error.code in REASONS)


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.data())
def test_changed_bytes_raise_nothing_but_peer_error(which: int, data: st.DataObject) -> None:
    messages = [frame.data for frame in GOOD]
    changed = bytearray(messages[which])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    messages[which] = bytes(changed)
    error = refusal(messages)
    assert error is None or error.code in REASONS


headers = st.builds(
    tensor_pb2.TensorHeader,
    name=st.text(max_size=100),
    dtype=st.integers(-(2**31), 2**31 - 1),
    shape=st.lists(st.integers(0, 2**64 - 1), max_size=12),
)


@given(st.integers(-(2**31), 2**31 - 1), st.lists(headers, max_size=4))
def test_any_announcement_is_read_or_refused(
    kind: int, tensors: list[tensor_pb2.TensorHeader]
) -> None:
    header = tensor_pb2.BundleHeader(kind=kind, tensors=tensors)  # type: ignore[arg-type]
    frame = exchange_pb2.Frame(header=header)
    frame.step.phase, frame.step.round, frame.step.batch = STEP
    error = refusal([frame.SerializeToString()])
    if error is not None:
        assert error.code in REASONS
        assert len(error.public) < 500
    if error is None or error.code is not Code.MALFORMED_MESSAGE:
        _, specs = parse_header(header, "north")
        assert list(specs) == [tensor.name for tensor in tensors]


def test_a_frame_is_small_enough_for_grpc() -> None:
    bundle = Bundle(
        Kind.WEIGHTS,
        {
            f"layer4.1.bn{n}.num_batches_tracked": Buffer(
                DType.UINT8, (1 << 17,), memoryview(bytes(1 << 17))
            )
            for n in range(60)
        },
    )
    sizes = [len(frame.data) for frame in encode(STEP, bundle)]
    # 7.5 MiB.
    assert len(sizes) == 4
    assert max(sizes) < FRAME_BYTES + 4096


def test_a_frame_with_nothing_in_it_is_a_message_too() -> None:
    (frame,) = encode(STEP, Bundle(Kind.ACK))
    assert parse_frame(frame.data, party="north").envelope.last
    assert frame.payload_bytes == 0
    assert assemble([frame.data], BundleSpec(Kind.ACK)) == Bundle(Kind.ACK)


def test_a_failure_of_a_party_is_a_frame() -> None:
    frame = exchange_pb2.Frame(failure=failure_pb2.Failure(code=Code.NON_FINITE, party="north"))  # type: ignore[arg-type]
    assert parse_frame(frame.SerializeToString(), party="south").envelope.failure.party == "north"


def test_the_table_of_what_a_party_says_has_every_field_of_the_schema() -> None:
    bodies = control_pb2.PartyMessage.DESCRIPTOR.oneofs_by_name["body"].fields
    schema = {
        body.name: set(body.message_type.fields_by_name)
        for body in bodies
        if body.message_type is not None
    }
    assert schema == {message: set(fields) for message, fields in PARTY_MESSAGES.items()}
    assert EMPTY_MESSAGES.keys() == {message for message, fields in schema.items() if not fields}
