"""Runs a process that makes a private key of HEU: ``python -m vfl_party.homomorphic.worker SCHEME
BITS``.

Making a key takes seconds in which HEU holds Python's global lock, so it would delay heartbeats in
the party's own process. The keys are written to standard output: the length of the public key in 4
bytes, little-endian, the public key, then the private key.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys

from vfl_common.errors import InternalError

# HEU's names of the schemes.
_NAMES = {"ou": "ou", "paillier": "z-paillier"}


def make_key_pair(scheme: str, bits: int) -> tuple[bytes, bytes]:
    """Makes keys in a separate process. Returns the public and the private key in HEU's format."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", __name__, scheme, str(bits)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # This process, and not the child, handles Ctrl-C at the terminal.
        start_new_session=True,
        check=False,
    )
    size, keys_bytes = int.from_bytes(process.stdout[:4], "little"), process.stdout[4:]
    if process.returncode or not 0 < size < len(keys_bytes):
        raise InternalError(
            "the process that makes the key has ended; the log lines above say why, unless it was "
            "killed"
        )
    return keys_bytes[:size], keys_bytes[size:]


def main() -> None:
    """Makes the keys and writes them to the standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    scheme, bits = sys.argv[1:]
    kit = importlib.import_module("heu.phe").setup(_NAMES[scheme], int(bits))
    public = kit.public_key().serialize()
    sys.stdout.buffer.write(
        len(public).to_bytes(4, "little") + public + kit.secret_key().serialize()
    )


if __name__ == "__main__":
    main()
