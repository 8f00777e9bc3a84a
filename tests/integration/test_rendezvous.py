"""torchrun's rendezvous: that of c10d unpickles what anybody writes into its store, so a party does
not start under it; the static one keeps no pickle there.
"""

from __future__ import annotations

import base64
import pickle
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.harness import cases, ports
from tests.harness.errors import error_line
from tests.harness.federation import BIN, Federation
from tests.harness.waiting import wait_until
from vfl_party.ranks.group import read_backend

RUN = ("--no-python", "--", "vfl-party", "run", "bank.toml")


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ("--standalone", "c10d"),
        # On one host torchrun takes the same without a port.
        ("--nproc-per-node 4", "c10d"),
        ("--master-addr 127.0.0.1", "c10d"),
        ("--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29400", "c10d"),
        ("--rdzv_backend=etcd-v2 --rdzv-endpoint host:1", "etcd-v2"),
        ("--master-addr 127.0.0.1 --master-port 29400", "static"),
        ("--nnodes 2 --node-rank 1 --master-addr gpu1", "static"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint gpu1:29400", "static"),
    ],
)
@pytest.mark.parametrize("program", [("/bin/torchrun",), ("python", "-m", "torch.distributed.run")])
def test_options_tell_the_rendezvous(program: tuple[str, ...], options: str, want: str) -> None:
    assert read_backend([*program, *options.split(), *RUN]) == want


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"PET_STANDALONE": "1"}, "c10d"),
        ({"PET_RDZV_BACKEND": "c10d"}, "c10d"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500"}, "static"),
    ],
)
def test_variables_tell_the_rendezvous(
    variables: dict[str, str], want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_backend(["torchrun", *RUN]) == want
    # Of another launcher they are all that is known.
    assert read_backend(["python", "launcher.py"]) == want


def test_a_party_does_not_start_where_others_could_run_code(tmp_path: Path) -> None:
    """Also if a shell is between torchrun and the party, as in the job of Slurm."""
    tables, data = cases.recipe(2), cases.digits(2)
    with Federation(tmp_path, tables, data, address="127.0.0.1:1", fresh=True) as federation:
        own = (str(BIN / "vfl-party"), "run", federation.write_party("p1").name)
        shell = ("bash", "-c", '"$@"; exit $?', "bash", *own)
        start = ("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "--", *shell)
        program = federation.start("p1", *start)
        assert program.wait() != 0
    assert "--master-addr 127.0.0.1" in error_line(program.stderr)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self._marker, "w")


@contextmanager
def launched(*options: str, port: int) -> Iterator[TCPStore]:
    """Yields the store of a torchrun whose process does nothing, as a stranger reaches it."""
    words = [str(BIN / "torchrun"), *options, "--no-python", "--", "sleep", "120"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize("static", [False, True])
def test_only_the_static_rendezvous_keeps_no_pickle_in_its_store(
    static: bool, tmp_path: Path
) -> None:
    """The other one runs a stranger's code, although its endpoint is on loopback."""
    address, marker = ports.address(), tmp_path / "ran"
    host, _, port = address.rpartition(":")
    dynamic = ("--rdzv-backend", "c10d", "--rdzv-endpoint", address)
    options = ("--master-addr", host, "--master-port", port) if static else dynamic
    with launched(*options, port=int(port)) as store:
        # Both have written something by the time that the process runs.
        keys = wait_until(lambda: store.list_keys(), lambda found: len(found) > static)
        states = [each for each in keys if "torch.rendezvous." in each]
        assert bool(states) != static
        for each in states:
            data = base64.b64encode(pickle.dumps(Payload(marker))).decode()
            store.set(each.lstrip("/"), data)
        if states:
            wait_until(marker.exists)
