"""A process that hashes, checks and masks what ``pool`` gives it: ``python -m
vfl_party.psi.worker``.

Its standard input is one end of a socket, on which it reads messages and answers each. A message is
a list of parts: their number and their lengths, 4 bytes each, little-endian, then the parts.

- First, without an answer: the secret and the salt. They are in no argument and no variable, which
  others could read.
- Then ``own`` and ids, or ``others``, a party's name and points. The answer is ``done`` and points,
  or ``refused`` and code, text and party of a PeerError.

The process ends when the other end is closed, after the batch in hand: so it does not outlive its
parent, however that ends. SIGINT and SIGTERM, which a terminal or systemd sends to all processes of
a program, are the parent's affair.
"""

from __future__ import annotations

import signal
import socket
import struct
from io import BufferedIOBase
from itertools import accumulate, pairwise

from vfl_common.errors import PeerError
from vfl_party.psi import curve, lanes

OWN, OTHERS, DONE, REFUSED = b"own", b"others", b"done", b"refused"


def send(stream: BufferedIOBase, *parts: bytes) -> None:
    """Writes a message. Raises OSError if the other side is gone."""
    stream.write(struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)))
    stream.write(b"".join(parts))
    stream.flush()


def receive(stream: BufferedIOBase) -> list[bytes]:
    """Reads a message. Raises EOFError if the other side is gone."""
    (number,) = struct.unpack("<I", _read(stream, 4))
    lengths = struct.unpack(f"<{number}I", _read(stream, 4 * number))
    content = _read(stream, sum(lengths))
    return [content[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _read(stream: BufferedIOBase, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def serve(stream: BufferedIOBase) -> None:
    """Answers until the other side is gone."""
    try:
        secret, salt = receive(stream)
        while True:
            send(stream, *_answer(receive(stream), secret, salt))
    except (EOFError, ConnectionError):
        return


def _answer(request: list[bytes], secret: bytes, salt: bytes) -> list[bytes]:
    kind, *rest = request
    if kind == OWN:
        return [DONE, lanes.own(rest, salt, secret)]
    party, points = rest
    try:
        curve.check(points, party.decode())
    except PeerError as error:
        return [REFUSED, str(int(error.code)).encode(), str(error).encode(), error.party.encode()]
    return [DONE, curve.masked(points, secret)]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as parent:
        serve(parent.makefile("rwb"))


if __name__ == "__main__":
    main()
