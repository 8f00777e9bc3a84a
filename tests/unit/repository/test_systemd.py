"""deploy/systemd: sound by systemd's own reading, calling commands that there are, restarting what
a restart mends.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.harness.present import present
from vfl_common.config.party import load_party
from vfl_common.config.recipe_tables import RunSettings
from vfl_common.errors import CATALOGUE, Code, UnwritableError
from vfl_common.rpc.guard import compute_connection_limit
from vfl_party.cli import cli as party
from vfl_server.cli import cli as server

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
PROGRAMS = {"vfl-server": server, "vfl-party": party}
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
TIMERS = sorted(path.name for path in FOLDER.glob("*.timer"))
# Units that start at boot, and again after every end.
LASTING = {"vfl-hub.service", "vfl-node@.service", "vfl-serve@.service"}
BIN = "/opt/vfl/bin/"
# --metrics-linger, as the units and the pages recommend it.
LINGER_S = 60
Unit = dict[tuple[str, str], list[str]]


def unit(name: str) -> Unit:
    """{(section, key): its values}, as systemd reads them: a key may occur several times."""
    found: Unit = {}
    section = ""
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and line[0] not in "#;":
            key, _, value = line.partition("=")
            found.setdefault((section, key), []).append(value)
    return found


def one(name: str, key: str) -> str:
    (value,) = unit(name)["Service", key]
    return value


def test_there_is_one_for_each_program() -> None:
    timed = ["vfl-party@.service", "vfl-predict@.service", "vfl-server@.service"]
    assert sorted([*timed, *LASTING]) == UNITS
    assert [name.replace(".timer", ".service") for name in TIMERS] == timed
    assert {path.suffix for path in FOLDER.iterdir()} == {".service", ".timer"}


@pytest.mark.parametrize("name", ["vfl-predict@.service", *sorted(LASTING)])
def test_every_unit_has_the_limits_of_a_run(name: str) -> None:
    run, other = unit("vfl-party@.service"), unit(name)
    differ = {key for key in run.keys() | other.keys() if run.get(key) != other.get(key)}
    expected = {
        ("Unit", "Description"),
        ("Service", "ExecStart"),
        ("Service", "EnvironmentFile"),
        ("Service", "RestartPreventExitStatus"),
    }
    if name in LASTING:
        expected |= {
            ("Install", "WantedBy"),
            ("Unit", "StartLimitIntervalSec"),
            ("Unit", "StartLimitBurst"),
        }
    if "serve@" in name:
        expected |= {
            ("Service", key) for key in ("ExecReload", "RestartSec", "TimeoutStartSec", "Type")
        }
    if name in ("vfl-hub.service", "vfl-node@.service"):
        expected |= {("Service", "WorkingDirectory"), ("Service", "TimeoutStopSec")}
    if name == "vfl-hub.service":
        expected |= {("Service", "User"), ("Service", "StateDirectory")}
    assert differ == expected


def test_the_units_of_a_party_share_user_folder_and_file() -> None:
    """Each unit as a user of its own takes the folder of runs from the others, and a key at a path
    of one unit cannot be read by another.
    """
    units = {name: unit(name) for name in UNITS if "server" not in name and "hub" not in name}
    for key in ("User", "StateDirectory"):
        (values,) = {tuple(each["Service", key]) for each in units.values()}
        assert "%i" in values[0], key
    # The node writes into the folder of its file.
    node = units.pop("vfl-node@.service")
    assert node["Service", "WorkingDirectory"] == [f"%S/{node['Service', 'StateDirectory'][0]}"]
    for each in units.values():
        assert each["Service", "WorkingDirectory"] == ["/etc/vfl/%i"]
        assert each["Service", "ExecStart"][0].split()[2] == "party.toml"
    for name in UNITS:
        assert ("Service", "DynamicUser") not in unit(name)
        assert ("Service", "LoadCredential") not in unit(name)
        assert "/run/credentials" not in (FOLDER / name).read_text()
        # The events of hub and node are on standard output anyway.
        assert ("--log-stdout" in one(name, "ExecStart")) == (not re.search("hub|node", name))


def test_one_party_file_gives_serving_a_port_of_its_own(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "how-to" / "operate" / "systemd.md").read_text()
    shown = re.findall(r"```toml title=\"(\w+).toml\"\n(.*?)```", page, re.DOTALL)
    needed = 'recipe = "r.toml"\nserver = "localhost:7000"\n'
    tls = '[tls]\nca = "ca"\ncertificate = "c"\nkey = "k"\n'
    found = {}
    for name, text in shown:
        path = tmp_path / f"{name}.toml"
        path.write_text(f'name = "{name}"\n{needed}{text}{tls}')
        found[name] = load_party(path)
    bank, shop = found["bank"], found["shop"]
    assert bank.serve.listen is not None
    assert bank.serve.listen != bank.listen
    # In a training the passive party dials what the server passes on.
    assert shop.active is None
    assert present(shop.serve.active).rpartition(":")[2] == bank.serve.listen.rpartition(":")[2]


@pytest.mark.parametrize("name", TIMERS)
def test_timers_start_the_unit_of_their_name(tmp_path: Path, name: str) -> None:
    (at,) = unit(name)["Timer", "OnCalendar"]
    assert at.endswith(" UTC")
    assert ("Timer", "Unit") not in unit(name)
    # The server comes first.
    server, party = (
        unit(f"vfl-{each}@.timer")["Timer", "OnCalendar"][0] for each in ("server", "party")
    )
    assert server < party
    if shutil.which("systemd-analyze") is None:
        return
    service = name.replace(".timer", ".service")
    text = (FOLDER / service).read_text().replace(BIN, f"{Path(sys.executable).parent}/")
    (tmp_path / service).write_text(text)
    assert verify(tmp_path, (FOLDER / name).read_text(), name) == ""


@pytest.mark.parametrize("name", UNITS)
def test_the_command_and_its_options_exist(name: str) -> None:
    words = shlex.split(one(name, "ExecStart"))
    program = words[0].removeprefix(BIN)
    assert words[0].startswith(BIN)
    command = present(PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), words[1]))
    assert words.pop() == "$OPTIONS"
    # Fails where one is unknown.
    with command.make_context(program, words[2:], resilient_parsing=False) as context:
        assert context.args == []
    known = {option for parameter in command.params for option in parameter.opts}
    comments = [line for line in (FOLDER / name).read_text().splitlines() if "OPTIONS=--" in line]
    shown = [word.partition("=")[0] for word in comments[0].partition("OPTIONS=")[2].split()]
    metrics = ["--metrics", "--metrics-linger"]
    expected = {
        "vfl-hub.service": ["--max-runs"],
        "vfl-node@.service": ["--console"],
        "vfl-predict@.service": ["--data", "--out"],
        "vfl-serve@.service": ["--metrics"],
    }
    assert shown == expected.get(name, metrics)
    assert len(comments) == 1
    assert {*shown} <= known


@pytest.mark.parametrize("name", UNITS)
def test_restarts_are_for_what_a_restart_mends(name: str) -> None:
    assert one(name, "Restart") == "on-failure"
    assert one(name, "SuccessExitStatus") == "130"
    if name in LASTING:
        # The next start may find a new certificate, or room on the disk.
        assert ("Service", "RestartPreventExitStatus") not in unit(name)
        assert unit(name)["Unit", "StartLimitIntervalSec"] == ["0"]
        assert int(one(name, "RestartSec")) >= (30 if "serve@" in name else 10)
        return
    prevented = {int(code) for code in one(name, "RestartPreventExitStatus").split()}
    bad_input = {
        CATALOGUE[code].exit_code
        for code in (Code.CONFIG_INVALID, Code.DATA_INVALID, Code.RECIPE_DIFFERS)
    }
    mended = {
        CATALOGUE[code].exit_code
        for code in (Code.PARTY_LOST, Code.STEP_TIMEOUT, Code.ABORTED, Code.INTERNAL)
    }
    # Scores without the others (5) stay as they are.
    assert prevented == (bad_input | {5} if "predict" in name else bad_input)
    prevented.discard(5)
    assert not prevented & mended
    # Each code is decided about.
    assert prevented | mended == {entry.exit_code for entry in CATALOGUE.values()}
    # A full disk can pass.
    assert UnwritableError.EXIT_CODE not in prevented
    # Or it would be tried for ever: a unit has failed, and pages, only after the limit.
    (burst,), (interval,) = (
        unit(name)["Unit", f"StartLimit{key}"] for key in ("Burst", "IntervalSec")
    )
    lasts_s = RunSettings().join_deadline_s + LINGER_S + int(one(name, "RestartSec"))
    assert int(burst) * lasts_s < 3600 * int(interval.removesuffix("h"))


@pytest.mark.parametrize("name", UNITS)
def test_a_program_may_write_its_runs_and_nothing_else(name: str) -> None:
    instance = "hub" if name == "vfl-hub.service" else "%i"
    for key, value in {
        "User": f"vfl-{instance}",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "CapabilityBoundingSet": "",
        "StateDirectory": f"vfl/{instance}",
    }.items():
        assert one(name, key) == value


@pytest.mark.parametrize("name", UNITS)
def test_strangers_cannot_use_up_its_files(name: str) -> None:
    assert compute_connection_limit(0, int(one(name, "LimitNOFILE"))) == compute_connection_limit(
        0, 1_000_000
    )


def verify(folder: Path, text: str, name: str) -> str:
    """What systemd says of a unit whose program is this environment's."""
    path = folder / name
    path.write_text(text.replace(BIN, f"{Path(sys.executable).parent}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_them(tmp_path: Path, name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (FOLDER / name).read_text()
    assert verify(tmp_path, text, name) == ""
    assert "ProtectSystm" in verify(tmp_path, text.replace("ProtectSystem=", "ProtectSystm="), name)


@pytest.mark.parametrize("name", UNITS)
def test_no_dump_of_memory(name: str) -> None:
    assert one(name, "LimitCORE") == "0"
