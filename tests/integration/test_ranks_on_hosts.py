"""A party of four processes on two hosts, each of which reads the table itself: the parameters of
one process, a host that is killed, a host with another table.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness import cases, reference
from tests.harness.federation import RUN_S, Program, toml
from tests.harness.hosts import Hosts, missing
from tests.integration.test_exact import largest_deviation
from tests.integration.test_resume import assert_equal
from vfl.certs.authority import create_authority, issue
from vfl_party.base.checkpoint import CheckpointStore

_WHY = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_WHY), reason=_WHY or "hosts of their own")]

# Of 1e-6 or less for the parameters of the ranks.
TOLERANCE = 1e-6
NAMES = {name: f"{name}.example.org" for name in ("fed", "first", "second")}
DATA = cases.digits(2)
# Many steps, so that a host can be killed between two of them; small ones, or a rounding grows.
RECIPE = cases.recipe(
    2,
    model={"encoder": {"kind": "mlp", "hidden": [12], "batch_norm": False}},
    phase={"batch_size": 6, "epochs": 6, "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9}},
    run={"rejoin_deadline_s": 5 * RUN_S},
)
STATIC = "--node-rank {rank} --master-addr first.example.org --master-port 29400"


def write(hosts: Hosts, data: dict[str, dict[str, Any]]) -> None:
    """Writes the files: on ``second`` no more than the party file and the recipe."""
    authority = hosts.folder / "ca"
    create_authority(authority, "test")
    for name, host in (("server", "fed"), ("p0", "fed"), ("p1", "first")):
        issue(authority, name, out=hosts.home(host) / "certs")
        shutil.copy(authority / "ca.pem", hosts.home(host) / "certs")
    for host in NAMES:
        (hosts.home(host) / "recipe.toml").write_text(toml(RECIPE))
    for name, host in (("p0", "fed"), ("p1", "first"), ("p1", "second")):
        tls = {"ca": "certs/ca.pem", "certificate": f"certs/{name}.pem", "key": f"certs/{name}.key"}
        file: dict[str, Any] = {
            "name": name,
            "recipe": "recipe.toml",
            "server": "fed.example.org:7000",
            "tls": tls,
            "data": data[host if host in data else name],
            "init": "recipe",
        }
        if name == "p0":
            file |= {"listen": "0.0.0.0:7001", "advertise": "fed.example.org:7001"}
        (hosts.home(host) / f"{name}.toml").write_text(toml(file))


def ranks(hosts: Hosts) -> list[Program]:
    """Starts the party of two processes on each of two hosts."""
    return [
        hosts.start(
            host,
            f"torchrun --nnodes 2 --nproc-per-node 2 {STATIC.format(rank=rank)} --no-python -- vfl-party run p1.toml",
        )
        for rank, host in enumerate(("first", "second"))
    ]


@contextmanager
def started(folder: Path) -> Iterator[tuple[Hosts, list[Program], Callable[[], Any]]]:
    """Server and parties; the last is called to wait for the parameters of both."""
    with Hosts(folder, NAMES) as hosts:
        write(hosts, DATA)
        server = hosts.start("fed", "vfl-server run recipe.toml --listen 0.0.0.0:7000")
        server.wait_for("ready")
        active = hosts.start("fed", "vfl-party run p0.toml")
        programs = ranks(hosts)

        def finish() -> dict[str, dict[str, Tensor]]:
            for program in (*programs, active, server):
                assert program.wait(RUN_S) == 0, program.stderr
            # The other host has no part of the run.
            assert not (hosts.home("second") / "runs").exists()
            return {"p0": parameters(hosts, "fed", "p0"), "p1": parameters(hosts, "first", "p1")}

        yield hosts, programs, finish


def store(hosts: Hosts, host: str, name: str) -> CheckpointStore | None:
    """Opens a party's checkpoints, once there are any."""
    found = [*hosts.home(host).glob(f"runs/*/{name}/checkpoints")]
    return CheckpointStore(found[0], keep=2) if found else None


def parameters(hosts: Hosts, host: str, name: str) -> dict[str, Tensor]:
    kept = store(hosts, host, name)
    assert kept is not None
    models = kept.load(kept.labels()[-1])["job"]["models"]
    return {
        f"{model}.{key}": each for model, state in models.items() for key, each in state.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    with started(tmp_path_factory.mktemp("undisturbed")) as (_, _, finish):
        found: dict[str, dict[str, Tensor]] = finish()
        return found


def test_they_get_the_parameters_of_one_process(
    undisturbed: dict[str, dict[str, Tensor]], record_property: Any
) -> None:
    worst = largest_deviation(undisturbed, reference.train(RECIPE, DATA))
    record_property("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE


def test_a_host_is_killed_and_both_are_started_again(
    undisturbed: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    with started(tmp_path) as (hosts, programs, finish):
        give_up_s = time.monotonic() + RUN_S
        while not ((kept := store(hosts, "first", "p1")) and kept.labels()):
            assert programs[0].process.poll() is None, programs[0].stderr
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        hosts.kill("second")
        for program in programs:
            assert program.wait() != 0
        assert "them again with the same command" in programs[0].stderr
        programs[:] = ranks(hosts)
        assert_equal(finish(), undisturbed)


@pytest.mark.parametrize("what", ["table", "recipe"])
def test_a_host_with_other_files_is_named(what: str, tmp_path: Path) -> None:
    # Nobody else is there, and none is asked.
    other = DATA | ({"second": DATA["p1"] | {"limit": 99}} if what == "table" else {})
    with Hosts(tmp_path, NAMES) as hosts:
        write(hosts, other)
        if what == "recipe":
            (hosts.home("second") / "recipe.toml").write_text(toml(RECIPE | {"seed": 8}))
        first, _ = ranks(hosts)
        assert first.wait(RUN_S) != 0
        (line,) = [each for each in first.stderr.splitlines() if each.startswith("error: ")]
        assert "process 2 of this party" in line
        fix = "Copy the same file to all hosts." if what == "table" else "Check the files there."
        assert line.endswith(fix)
        assert (what == "recipe") == ("recipe" in line)
