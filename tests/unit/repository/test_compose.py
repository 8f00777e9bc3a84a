"""docker-compose.oneshot.yml and docker-compose.yml as they are written: who sees what.
deploy/try-compose looks at what comes of them, on an engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.present import present
from vfl_common.config.base import parse
from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import load_recipe
from vfl_hub.settings import NamedData
from vfl_serve.commands import serve

ROOT = Path(__file__).parents[3]
ONE_SHOT, STANDING = ROOT / "docker-compose.oneshot.yml", ROOT / "docker-compose.yml"
ALL: dict[str, Any] = yaml.safe_load(ONE_SHOT.read_text())["services"]
# What runs without --profile, and what runs in place of the parties with --profile gpu.
SERVICES = {name: each for name, each in ALL.items() if each.get("profiles") != ["gpu"]}
ON_GPUS = {name: each for name, each in ALL.items() if name not in SERVICES}
RECIPE = load_recipe(ROOT / "examples" / "digits.toml")
PARTIES = [party.name for party in RECIPE.parties]
STAYING: dict[str, Any] = yaml.safe_load(STANDING.read_text())["services"]
RUNS = "${VFL_RUNS:-./runs}"


def mounts(service: str, services: dict[str, Any] = SERVICES) -> dict[str, str]:
    """{source: target}; all of another party's would be seen here."""
    return {
        line.rsplit(":/", 1)[0]: "/" + line.rsplit(":/", 1)[1]
        for line in services[service]["volumes"]
    }


def test_the_services_are_those_of_the_recipe() -> None:
    assert set(SERVICES) == {RECIPE.server, *PARTIES, "folders", "certificates", "data"}


@pytest.mark.parametrize("name", PARTIES)
def test_a_party_sees_its_own_data_key_and_runs(name: str) -> None:
    assert mounts(name) == {
        "./examples/digits.toml": "/federation/recipe.toml:ro",
        f"./deploy/demo/{name}.toml": f"/federation/{name}.toml:ro",
        f"{RUNS}/federation/certs/{name}": "/federation/certs:ro",
        f"{RUNS}/federation/data/{name}": "/federation/data:ro",
        f"{RUNS}/{name}": "/runs",
    }
    file = load_party(ROOT / "deploy" / "demo" / f"{name}.toml")
    assert (file.name, file.server, file.out) == (name, "server:7000", "/runs")


def test_the_server_sees_no_data_and_one_service_alone_the_authority() -> None:
    assert set(mounts("server")) == {
        "./examples/digits.toml",
        f"{RUNS}/federation/certs/server",
        f"{RUNS}/server",
    }
    keepers = [name for name in SERVICES if f"{RUNS}/federation/ca" in mounts(name)]
    assert keepers == ["certificates"]
    whole = [name for name in SERVICES if {RUNS, f"{RUNS}/federation"} & set(mounts(name))]
    # Which makes and gives away folders, without a network.
    assert whole == ["folders"]


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_has_rights_or_a_way_out(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]
    assert "ports" not in service
    assert (service["user"] == "0:0") == (name == "folders")
    once = name not in {RECIPE.server, *PARTIES}
    assert service.get("network_mode") == ("none" if once else None)
    assert service.get("restart") == (None if once else "on-failure:5")
    assert yaml.safe_load(ONE_SHOT.read_text())["networks"] == {"federation": {"internal": True}}


@pytest.mark.parametrize("service", [*SERVICES.values(), *STAYING.values()])
def test_nobody_can_fill_the_machine(service: dict[str, Any]) -> None:
    assert service["pids_limit"] == 1024
    assert service["cpus"] == "${VFL_CPUS:-1}"
    assert service["mem_limit"] == "${VFL_MEMORY:-4g}"
    assert service["tmpfs"] == ["/tmp:size=256m"]  # noqa: S108 - in a container
    assert service["ulimits"] == {"core": 0}
    assert service["logging"] == {
        "driver": "json-file",
        "options": {"max-size": "10m", "max-file": "3"},
    }


def test_the_server_s_image_is_one_without_torch() -> None:
    assert SERVICES["server"]["image"] == "${VFL_SERVER_IMAGE:-vfl-server}"
    assert SERVICES["server"]["build"]["target"] == "server"
    others = {service["image"] for name, service in SERVICES.items() if name != "server"}
    assert others == {"${VFL_IMAGE:-vfl}"}
    assert SERVICES["folders"]["build"]["target"] == "party"
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    # Without BuildKit, all stages above the target are built; the last is what `docker build` makes.
    assert stages == ["base", "wheels", "server", "libraries", "party"]


def test_a_gpu_of_its_own_for_each_party() -> None:
    assert list(ON_GPUS) == [f"{name}-gpu" for name in PARTIES]
    for number, name in enumerate(PARTIES):
        service = ON_GPUS[f"{name}-gpu"]
        # Others find it by the party's name.
        assert service.pop("networks") == {"federation": {"aliases": [name]}}
        assert service.pop("command") == [*SERVICES[name]["command"], "--device", "cuda"]
        (device,) = service.pop("deploy")["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [f"${{{name.upper()}_GPU:-{number}}}"]
        own = {key: each for key, each in SERVICES[name].items() if key in service}
        assert service == own | {"profiles": ["gpu"]}


def test_a_profile_is_chosen_where_none_is_named() -> None:
    assert {name for name, each in ALL.items() if each.get("profiles") == ["cpu"]} == {*PARTIES}
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()


# -- docker-compose.yml: a hub, and nodes that stay


@pytest.mark.parametrize("name", PARTIES)
def test_a_node_sees_its_own_data_key_and_runs(name: str) -> None:
    assert mounts(name, STAYING) == {
        "./deploy/demo/node": "/demo/node:ro",
        f"./deploy/demo/standing/{name}.toml": "/demo/data.toml:ro",
        f"{RUNS}/standing/invitations/{name}": "/invitation:ro",
        f"{RUNS}/standing/{name}": "/federation",
        f"{RUNS}/federation/data/{name}": "/data:ro",
    }
    service = STAYING[name]
    assert service["restart"] == "unless-stopped"
    # The console is on this machine alone.
    number = 8081 + PARTIES.index(name)
    assert service["ports"] == [f"127.0.0.1:${{{name.upper()}_CONSOLE:-{number}}}:8080"]
    tables = tomllib.loads((ROOT / "deploy" / "demo" / "standing" / f"{name}.toml").read_text())
    data = parse(NamedData, tables["data"]["digits"], "data.digits")
    assert (data.approval, data.proposers) == ("automatic", ("bank",))
    one_shot = load_party(ROOT / "deploy" / "demo" / f"{name}.toml")
    party = parse(
        PartyFile,
        {**data.party, "name": name, "recipe": "r", "server": "s:1", "tls": dict(one_shot.tls)},
        name,
    )
    assert party.policy == one_shot.policy
    given, expected = present(party.data), present(one_shot.data)
    assert (given.label, given.id) == (expected.label, expected.id)


def test_who_stays_sees_no_more_than_it_needs() -> None:
    once = {"folders", "data", "members", "propose"}
    assert set(STAYING) == {"hub", *PARTIES, *once}
    of_hub = [name for name in STAYING if f"{RUNS}/standing/hub" in mounts(name, STAYING)]
    assert of_hub == ["members", "hub"]
    token = {name for name in STAYING if f"{RUNS}/standing/bank/node" in mounts(name, STAYING)}
    assert token == {"propose"}
    whole = [name for name in STAYING if {RUNS, f"{RUNS}/standing"} & set(mounts(name, STAYING))]
    assert whole == ["folders"]
    networks = yaml.safe_load(STANDING.read_text())["networks"]
    assert networks.pop("federation") == {"internal": True}
    (options,) = networks.pop("people").values()
    assert options == {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    assert networks == {}
    for name, service in STAYING.items():
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)
        assert (service["user"] == "0:0") == (name == "folders")
        assert ("ports" in service) == (name in PARTIES)
        expected = ["federation"] if name in ("hub", "propose") else None
        assert service.get("networks") == (
            ["federation", "people"] if name in PARTIES else expected
        )
        assert service.get("network_mode") == ("none" if name in once - {"propose"} else None)
    demo = (ROOT / "deploy" / "demo" / "node").read_text()
    assert "exec vfl-party node demo.toml --console" in demo
    assert STAYING["propose"]["command"][2:] == PARTIES == STAYING["members"]["command"][2:]


def compose_command() -> list[str] | None:
    """``docker compose``, or the ``docker-compose`` before it; None: neither is there."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, timeout=60).returncode == 0:
            return command
    return None


@pytest.mark.parametrize("profile", ["", "cpu", "gpu"])
def test_compose_takes_each_profile(profile: str) -> None:
    command = compose_command()
    if command is None:
        pytest.skip("neither docker compose nor docker-compose is installed")
    command += ["-f", ONE_SHOT.name, *(["--profile", profile] if profile else [])]
    environment = {key: each for key, each in os.environ.items() if key != "COMPOSE_PROFILES"}
    said = subprocess.run(
        [*command, "config", "--services"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    ending = "-gpu" if profile == "gpu" else ""
    parties = {f"{name}{ending}" for name in PARTIES}
    found, wanted = {*said.stdout.split()}, {"server", "folders", "certificates", "data", *parties}
    # The one before lists those of other profiles, too.
    assert found == wanted if command[0] == "docker" else found >= wanted


def test_the_images_are_made_from_all_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    includes = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.rstrip("*").removesuffix(".") for name in includes}
    assert {f"!{name}" for name in packages} <= {*(ROOT / ".dockerignore").read_text().split()}


def built(folder: Path, *args: str, **variables: str) -> tuple[int, list[str]]:
    """Runs deploy/build-images with a `docker` that only says what it was asked; (exit code, its
    lines).
    """
    fake = folder / "docker"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    done = subprocess.run(
        [ROOT / "deploy" / "build-images", *args], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout.splitlines()


def test_images_have_labels_of_what_they_are_made(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code, lines = built(tmp_path, TORCH="cpu", VFL_TAG="new")
    assert code == 0
    assert [line.split()[:5] for line in lines] == [
        ["build", "--target", "server", "-t", "vfl-server:new"],
        ["build", "--target", "party", "-t", "vfl:new"],
    ]
    for line in lines:
        assert f"VERSION={project['version']} " in line
        assert "--build-arg TORCH=cpu" in line
    labels = re.findall(r"image\.(\w+)=\"\$\{(\w+)\}\"", (ROOT / "Dockerfile").read_text())
    # Of each of the two images.
    assert labels == [(name, name.upper()) for name in ("version", "revision", "source")] * 2
    assert built(tmp_path, "server")[1][0].startswith("build --target server -t vfl-server:latest ")
    assert built(tmp_path, "client")[0] == 2


# -- deploy/serve.yml: the same parties serve what they have trained

SERVED: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "serve.yml").read_text())


def test_who_serves_sees_what_it_saw_in_training() -> None:
    services = SERVED["services"]
    assert set(services) == {*PARTIES, "token"}
    for name in PARTIES:
        seen = {
            line.replace("../examples", "./examples")
            .replace("./demo", "./deploy/demo")
            .replace(":-../runs", ":-./runs")
            for line in services[name]["volumes"]
        }
        assert seen == {*SERVICES[name]["volumes"]}
    # The token is made where no network is, with the bank's runs alone.
    assert services["token"]["network_mode"] == "none"
    assert not [line for line in services["token"]["volumes"] if "certs" in line or "data" in line]


def test_only_the_active_party_that_serves_has_a_port_and_a_way_out() -> None:
    services = SERVED["services"]
    for name, each in services.items():
        assert (each["cap_drop"], each["read_only"]) == (["ALL"], True)
        assert ("ports" in each) == (name == "bank")
        if name != "token":
            wanted = ["federation", "callers"] if name == "bank" else ["federation"]
            assert each["networks"] == wanted
            context = serve.make_context("x", each["command"][2:], resilient_parsing=True)
            assert context.params["trained"] == ("${VFL_RUN:-latest}",)
    assert SERVED["networks"]["federation"] == {"internal": True}
    # On this machine alone, and with a token.
    (port,) = services["bank"]["ports"]
    file = load_party(ROOT / "deploy" / "demo" / "bank.toml")
    assert port.startswith("127.0.0.1:")
    assert port.endswith(f":{file.serve.http.rsplit(':', 1)[1]}")
    assert file.serve.tokens is not None
    for name in PARTIES:
        own = load_party(ROOT / "deploy" / "demo" / f"{name}.toml")
        assert own.active == (None if name == "bank" else file.advertise)
