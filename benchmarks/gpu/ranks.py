"""A party of several processes with NCCL, on one GPU: ``python -m benchmarks.gpu.ranks``.

One process started by torchrun is an ordinary party. Two on one GPU NCCL refuses, so each says that
it is on a host of its own (``NCCL_HOSTID``), and they speak over sockets: the code that runs is that
of two GPUs, the speed is not. What they learn is compared with one process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu.tell import device_option, tell, tiny_option
from tests.harness import cases, reference
from tests.harness.federation import Federation
from tests.harness.ports import address
from tests.integration.test_exact import largest_deviation
from tests.integration.test_resume import parameters
from vfl_party.base import devices
from vfl_party.base.devices import plain_arithmetic

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"kind": "cnn", "channels": [4]}),
    "two processes": (2, {"kind": "cnn", "channels": [4], "batch_norm": False}),
    "two processes, batch norm": (2, {"kind": "cnn", "channels": [4]}),
}


def tables_of(encoder: dict[str, Any]) -> dict[str, Any]:
    return cases.recipe(
        2,
        model={"embedding_size": 64, "encoder": encoder},
        phase={"batch_size": 26, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
    )


def run(case: str, device: str) -> None:
    count, encoder = CASES[case]
    tables, data = tables_of(encoder), cases.digits(2)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Federation(folder, tables, data, fresh=True) as federation:
            federation.start_server()
            federation.start_party("p0", "--device", device)
            federation.write_party("p1")
            port = address().rpartition(":")[2]
            static = ("--master-addr", "127.0.0.1", "--master-port", port)
            words = (*static, "--nproc-per-node", str(count), "-m", "benchmarks.gpu.ranks")
            federation.start(
                "p1",
                *("python", "-m", "torch.distributed.run", *words),
                *("--party", "p1.toml", "--device", device),
                environment=environment,
            )
            summary = federation.finish(60)
        want = reference.train(tables, data, device=device)
        want = {name: {key: x.cpu() for key, x in of.items()} for name, of in want.items()}
        tell(
            "ranks",
            case=case,
            devices=[each["device"] for each in summary["parties"]],
            apart=largest_deviation(parameters(federation), want),
        )


def act(file: str, device: str) -> None:
    """Be a process of the party."""
    from vfl_party.__main__ import main

    if device == "cuda" and "RANK" in os.environ:
        os.environ |= {"NCCL_HOSTID": f"host{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
        # One GPU for all.
        from vfl_party.assembly import files

        files.resolve_device = lambda _text: torch.device("cuda", 0)
        devices.resolve_device = files.resolve_device
    sys.argv = ["vfl-party", "run", file, "--device", device]
    main()


@click.command()
@device_option
@tiny_option
@click.option("--party", help="Be a process of this party.")
def main(device: str, tiny: bool, party: str | None) -> None:
    """Run each case."""
    if party is not None:
        act(party, device)
        return
    plain_arithmetic()
    for case in [*CASES][: 2 if tiny else None]:
        try:
            run(case, device)
        except Exception as error:  # noqa: BLE001 - the others are told still
            tell("failed", case=case, why=str(error)[-3000:])


if __name__ == "__main__":
    main()
