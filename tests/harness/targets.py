"""What coverage-guided fuzzing feeds bytes to: everything that reads what a peer has written.

A target takes any bytes. It returns if they are read, or refused with an error of the catalogue;
what else comes out of it is a defect. ``scripts/fuzz-coverage`` searches with atheris; ``CORPUS``
keeps the bytes that were worth it, and the tests feed them again.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from tests.contract.exchanges import ACTIVE, credentials
from tests.harness.fuzz import ROSTER, SAID, SENT, SPEC, TOLD, coordinator, hear, joined
from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.errors import InternalError, VflError
from vfl_common.frames import Assembly, parse_frame, parse_header
from vfl_common.packing.bundles import decode, encode, wire_spec
from vfl_common.packing.coders import Bits, Coder, Half, TopK
from vfl_party.homomorphic import CipherError, Encryption, make_adder, make_keys
from vfl_party.psi.sealed import KeyPair, verify_introduction
from vfl_server.control.service import _parse

Target = Callable[[bytes], None]

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
# Bytes of a case.
LONGEST = 4096
# Bytes of a target's kept cases.
MOST_KEPT = 12_000
_STEP = StepKey("train", 0, 0)
_CODERS: tuple[Coder, ...] = (
    *(Bits(bits, half=half) for bits in (8, 4, 2) for half in (False, True)),
    *(TopK(keep, half=half) for keep in (0.25, 3) for half in (False, True)),
    Half(DType.FLOAT16),
    Half(DType.BFLOAT16),
)
# Of keys that only tests take.
_KEY_BITS = 512


def _parts(data: bytes) -> Iterator[bytes]:
    """Cuts a case into messages: each begins with its length in two bytes, and the last one may be
    cut short.
    """
    while data:
        size = 2 + int.from_bytes(data[:2], "little")
        yield data[2:size]
        data = data[size:]


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(2, "little") + each for each in parts)


def frames(data: bytes) -> None:
    """Takes the frames of one bundle in, as a hub does."""
    assembly: Assembly | None = None
    for each in _parts(data):
        frame = parse_frame(each, party="p1")
        if frame.envelope.HasField("header"):
            parse_header(frame.envelope.header, "p1")
            assembly = Assembly(frame, SPEC, party="p1", allocate=_within)
        if assembly is not None:
            bundle = assembly.feed(frame)
            assert bundle is None or set(bundle.tensors) == set(SPEC.tensors)


def _within(nbytes: int) -> memoryview:
    assert nbytes <= SPEC.payload_bytes, f"{nbytes} bytes taken"
    return memoryview(bytearray(nbytes))


def packed(data: bytes) -> None:
    """Decodes a packed tensor. The first three bytes choose the coder and the shape, the others
    fill its parts.
    """
    code, rows, width = (*data[:3], 0, 0, 0)[:3]
    coder = _CODERS[code % len(_CODERS)]
    shape = (1 + rows % 8, 1 + width % 40)
    spec = BundleSpec(Kind.EMBEDDING, {"z": TensorSpec(DType.FLOAT32, shape)})
    crossing = wire_spec(coder, spec)
    content = data[3:].ljust(sum(each.nbytes for each in crossing.tensors.values()), b"\0")
    tensors, at = {}, 0
    for name, each in crossing.tensors.items():
        tensors[name] = Buffer(each.dtype, each.shape, memoryview(content[at : at + each.nbytes]))
        at += each.nbytes
    found = decode(coder, Bundle(spec.kind, tensors), spec, party="p1", step=_STEP).tensors["z"]
    values = np.frombuffer(found.data, "<f4")
    assert values.size == math.prod(shape)
    # What goes as it is, is looked at later.
    if "z" not in crossing.tensors:
        assert np.isfinite(values).all()


@cache
def _pairs() -> tuple[KeyPair, KeyPair]:
    return KeyPair(bytes(range(32))), KeyPair(bytes(range(1, 33)))


def sealed(data: bytes) -> None:
    """Reads an introduction, or opens what a peer has sealed; the first byte chooses."""
    own, peer = _pairs()
    if data[:1] == b"\0":
        verify_introduction(data[1:], credentials(ACTIVE), "north", b"run")
    else:
        own.open(peer.public, b"step", data[1:], "north")


def keys(data: bytes) -> None:
    """Takes a public key and a ciphertext for sums; the first byte chooses the scheme."""
    scheme: Encryption = "ou" if data[:1] == b"\0" else "paillier"
    message, rest = next(_parts(data[1:]), b""), data[3 + int.from_bytes(data[1:3], "little") :]
    try:
        sums = make_adder(scheme, _KEY_BITS, message)
        width = _KEY_BITS // 4 if scheme == "paillier" else _KEY_BITS // 8 + 2
        sums.load(np.frombuffer(rest.ljust(width, b"\0")[:width], np.uint8).reshape(1, width))
    except CipherError:
        pass


def party_messages(data: bytes) -> None:
    """Lets a server hear what parties say: the first byte of each message says which one speaks."""
    run = coordinator()
    members = joined(run)
    for each in _parts(data):
        name = ROSTER[each[0] % len(ROSTER)] if each else ROSTER[0]
        _take(lambda each=each, name=name: run.handle(members[name], _parse(each[1:], name)))  # type: ignore[misc]
    run.tick()
    run.status()


def server_messages(data: bytes) -> None:
    """Lets a party hear messages of a server while it joins."""
    hear(list(_parts(data)))


def _take(what: Callable[[], object]) -> None:
    """Calls it; an error of the catalogue is fine, but for a defect of ours."""
    try:
        what()
    except InternalError:
        raise
    except VflError:
        pass


TARGETS: dict[str, Target] = {
    "frames": frames,
    "packed": packed,
    "sealed": sealed,
    "keys": keys,
    "party-messages": party_messages,
    "server-messages": server_messages,
}


def feed(name: str, data: bytes) -> None:
    """Feeds a target. Raises whatever is a defect."""
    _take(lambda: TARGETS[name](data[:LONGEST]))


def honest(name: str) -> list[bytes]:
    """Returns honest cases, to begin with."""
    if name == "frames":
        whole = [each.SerializeToString() for each in SENT]
        return [_joined(whole[:-2]), _joined(whole)]
    if name == "packed":
        values = np.linspace(-1, 1, 3 * 9, dtype=np.float32).reshape(3, 9)
        bundle = Bundle(
            Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, values.shape, values.data.cast("B"))}
        )
        made = [encode(each, bundle, 7, "p1", _STEP).tensors for each in _CODERS]
        return [
            bytes([n, 2, 8]) + b"".join(bytes(t.data) for t in each.values())
            for n, each in enumerate(made)
        ]
    if name == "sealed":
        receiver, sender = _pairs()
        hello = sender.introduction(credentials("north"), b"run")
        return [b"\0" + hello, b"\1" + sender.seal(receiver.public, b"step", bytes(64))]
    if name == "keys":
        own, public = make_keys("paillier", _KEY_BITS, with_heu=False)
        return [b"\1" + _joined([public]) + own.encrypt(np.array([3]), np.array([5])).tobytes()]
    if name == "party-messages":
        said = [bytes([n % 3]) + each.SerializeToString() for n, each in enumerate(SAID)]
        return [*(_joined([each]) for each in said), _joined(said)]
    told = [each.SerializeToString() for each in TOLD]
    return [*(_joined([each]) for each in told), _joined(told)]


def kept(name: str) -> list[bytes]:
    """Returns the kept cases of a target; an empty list if there are no such."""
    file = CORPUS / f"{name}.txt"
    return (
        [b64decode(line) for line in file.read_text(encoding="ascii").splitlines()]
        if file.exists()
        else []
    )


def keep(name: str, cases: Iterable[bytes]) -> None:
    """Keeps cases, a line of base64 each: the shortest that have room in ``MOST_KEPT`` bytes."""
    CORPUS.mkdir(exist_ok=True)
    chosen, room = [], MOST_KEPT
    for each in sorted(set(cases), key=lambda case: (len(case), case)):
        room -= len(each)
        if room < 0:
            break
        chosen.append(each)
    (CORPUS / f"{name}.txt").write_text(
        "".join(f"{b64encode(each).decode()}\n" for each in chosen), encoding="ascii"
    )
