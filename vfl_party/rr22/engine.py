"""Runs SecretFlow's RR22 on one file, in a process of its own: ``python engine.py PACKAGE RANK
RELAY INPUT OUTPUT``. It reads the name of its link on standard input. With ``PACKAGE`` alone it
only loads the engine.

This is the only file that imports the wheel ``spu``. It loads the wheel's two shared objects
without the rest of the package, which needs JAX. It imports nothing of ours, so it starts quickly
and has no secrets of the party.

The engine talks to the relay of ``vfl_party.rr22.relay`` on loopback, which stands for the other
party. It prints ``port PORT`` when it is about to listen, and ``done`` when the output is written.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import traceback
import types
from typing import Any, TextIO

# Long enough for the slowest turn of the peer: the relay has limits of its own.
_TIMEOUT_MS = 24 * 3600 * 1000
_MAX_MESSAGE = 64 << 20
_NAME_BYTES = 32
# The exit code of an engine whose port another process has taken.
PORT_TAKEN = 75
# A bucket of the most rows takes 0.6 GiB.
_MAX_MEMORY = 3 << 30


def load(package: str) -> tuple[Any, Any]:
    """Returns ``libspu`` and ``libpsi`` from the folder of the package."""
    stub = types.ModuleType("spu")
    stub.__path__ = [package]
    sys.modules["spu"] = stub
    from spu import libpsi, libspu  # type: ignore[import-untyped]

    return libspu, libpsi


def _end_with_parent() -> None:
    """Ends this process when its standard input is closed."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _connect(libspu: Any, rank: int, relay: int, name: str, control: TextIO) -> Any:
    """Returns the engine's link, which listens on a free port of loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print("port", port, file=control, flush=True)
    hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{relay}"]
    desc = libspu.link.Desc()
    desc.id = name
    for number, host in enumerate(hosts if rank == 0 else hosts[::-1]):
        desc.add_party(str(number), host)
    desc.brpc_channel_protocol = "h2:grpc"
    desc.recv_timeout_ms = desc.http_timeout_ms = _TIMEOUT_MS
    desc.http_max_payload_size = _MAX_MESSAGE
    desc.throttle_window_size = 0
    try:
        return libspu.link.create_brpc(desc, rank)
    except RuntimeError:
        traceback.print_exc()
        os._exit(PORT_TAKEN)


def main() -> None:
    """Runs the engine once."""
    package, *rest = sys.argv[1:]
    libspu, libpsi = load(package)
    if not rest:
        return
    rank, relay, source, result = int(rest[0]), int(rest[1]), rest[2], rest[3]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The engine makes room for as many rows as the peer's engine announces.
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    # The engine logs to standard output, also from other threads.
    control = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name = os.read(0, _NAME_BYTES).decode()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    link = _connect(libspu, rank, relay, name, control)
    config = libpsi.PsiExecuteConfig(
        protocol_conf=libpsi.PsiProtocolConfig(
            protocol=libpsi.PsiProtocol.PROTOCOL_RR22,
            receiver_rank=0,
            bucket_size=1 << 30,
            broadcast_result=True,
            # The mode with less traffic of this wheel loses rows (secretflow/psi#370).
            rr22_params=libpsi.Rr22Rarams(low_comm_mode=False),
        ),
        input_params=libpsi.InputParams(path=source, selected_keys=["id"], keys_unique=True),
        output_params=libpsi.OutputParams(path=result, disable_alignment=True),
    )
    libpsi.psi_execute(config, link)
    print("done", file=control, flush=True)
    # The link answers the relay until the parent ends this process.
    threading.Event().wait()


if __name__ == "__main__":
    main()
