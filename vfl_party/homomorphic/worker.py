"""A process that makes a private key of HEU: ``python -m
vfl_party.homomorphic.worker SCHEME BITS``.

This takes seconds in which HEU holds Python's global lock, so the party's own process cannot do it
between heartbeats. The keys go to the standard output: the length of the public key in 4 bytes,
little-endian, that key, then the private.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys

from vfl_common.errors import InternalError

# HEU's names of the schemes.
_NAMES = {"ou": "ou", "paillier": "z-paillier"}


def keys(scheme: str, bits: int) -> tuple[bytes, bytes]:
    """Makes keys in a separate process. Returns the public and the private key, as HEU writes
    them.
    """
    made = subprocess.run(
        [sys.executable, "-P", "-m", __name__, scheme, str(bits)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # This process, and not the child, handles Ctrl-C at the terminal.
        start_new_session=True,
        check=False,
    )
    size, rest = int.from_bytes(made.stdout[:4], "little"), made.stdout[4:]
    if made.returncode or not 0 < size < len(rest):
        raise InternalError(
            "the process that makes the key has ended; the log lines above say why, unless it was "
            "killed"
        )
    return rest[:size], rest[size:]


def main() -> None:
    """Makes the keys and writes them to the standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    scheme, bits = sys.argv[1:]
    made = importlib.import_module("heu.phe").setup(_NAMES[scheme], int(bits))
    public = made.public_key().serialize()
    sys.stdout.buffer.write(
        len(public).to_bytes(4, "little") + public + made.secret_key().serialize()
    )


if __name__ == "__main__":
    main()
