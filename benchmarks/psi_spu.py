"""Runs the wheel ``spu`` alone, without us: ``python psi_spu.py RANK PORT PEER_PORT INPUT OUTPUT
PROTOCOL`` is one of the two parties. ``run`` starts both.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROTOCOLS = ("RR22", "ECDH")
_LIMIT_S = 7200


def run(inputs: tuple[Path, Path], protocol: str) -> dict[str, Any]:
    """Returns the seconds of both processes from start to end, their CPU seconds, and the common
    ids. ``inputs``: the CSV files of both parties, with a column ``id``.
    """
    ports = [_find_port(), _find_port()]
    outputs = [path.with_suffix(".spu") for path in inputs]
    began_s = time.monotonic()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, str(rank), str(ports[rank]), str(ports[1 - rank])),
                *(str(inputs[rank]), str(outputs[rank]), protocol),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=_LIMIT_S)[0].splitlines() for process in processes]
    seconds = time.monotonic() - began_s
    costs = [json.loads(next(line for line in reversed(s) if line.startswith(b"{"))) for s in said]
    lists = [sorted(path.read_text().split()[1:]) for path in outputs]
    if lists[0] != lists[1]:
        raise RuntimeError("spu: the parties' lists differ")
    cpu_s, mib = sum(cost["cpu_s"] for cost in costs), max(cost["mib"] for cost in costs)
    return {"seconds": seconds, "cpu_s": cpu_s, "mib": mib, "common": lists[0]}


def _find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def main() -> None:
    """Runs one party."""
    from vfl_party.rr22 import engine, relay

    rank, port, peer, source, result, protocol = sys.argv[1:]
    libspu, libpsi = engine.load(relay.find_package())
    desc = libspu.link.Desc()
    desc.id = "root"
    hosts = [f"127.0.0.1:{port}", f"127.0.0.1:{peer}"]
    for number, host in enumerate(hosts if rank == "0" else hosts[::-1]):
        desc.add_party(str(number), host)
    link = libspu.link.create_brpc(desc, int(rank))
    config = libpsi.PsiExecuteConfig(
        protocol_conf=libpsi.PsiProtocolConfig(
            protocol=getattr(libpsi.PsiProtocol, f"PROTOCOL_{protocol}"),
            receiver_rank=0,
            broadcast_result=True,
            ecdh_params=libpsi.EcdhParams(curve=libpsi.EllipticCurveType.CURVE_25519),
        ),
        input_params=libpsi.InputParams(path=source, selected_keys=["id"], keys_unique=True),
        output_params=libpsi.OutputParams(path=result, disable_alignment=True),
    )
    libpsi.psi_execute(config, link)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"cpu_s": used.ru_utime + used.ru_stime, "mib": used.ru_maxrss / 1024}
    print(f"\n{json.dumps(cost)}", flush=True)
    link.stop_link()


if __name__ == "__main__":
    main()
