"""Two organisations and a hub, from the invitation to the trained model, as people do it.

The organisations are network namespaces to which nobody can connect. People type commands, edit
their node's file, and approve the run in a browser.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.browser import Browser, browser
from tests.harness.federation import RUN_S, Program, toml
from tests.harness.hosts import Hosts, missing
from tests.harness.standing import MEMBERS, make_recipe, make_tables, simulate
from tests.harness.waiting import wait_until
from vfl_hub.library import NodeClient

_ABSENT = [name for name in ("ss", "chromium", "chromedriver") if shutil.which(name) is None]
_WHY = missing() or (f"needs {', '.join(_ABSENT)}" if _ABSENT else "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_WHY), reason=_WHY or "hosts of their own")]

PORT = 7443
NAMES = {name: f"{name}.example.org" for name in ("hub", *MEMBERS)}
MAX_ACTIONS = 15
LABELS = {"bank": ', label = "y"', "shop": ""}
DATA = """
[data.customers]
description = "customers since 2020"
[data.customers.party]
data = {{ source = "customers.csv", id = "id"{label} }}
init = "recipe"
"""


class Story:
    """Counts what people do: commands, and in the browser addresses that they open and clicks."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.actions = hosts, list[str]()

    def type(self, host: str, line: str) -> Program:
        """Types a command, which goes on."""
        self.actions.append(f"{host}$ {line[:60]}")
        return self.hosts.start(host, line)

    def read(self, host: str, line: str) -> list[str]:
        """Types a command, and returns the lines that it prints."""
        program = self.type(host, line)
        assert program.wait() == 0, program.stderr
        return [str(event["text"]).strip() for event in program.seen()]

    def open(self, page: Browser, url: str) -> None:
        """Opens an address."""
        self.actions.append(f"open {url[:60]}")
        page.open(url)

    def click(self, page: Browser, text: str) -> None:
        """Clicks."""
        self.actions.append(f"click {text}")
        page.click(text)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, NAMES) as hosts:
        for name, table in make_tables().items():
            (hosts.home(name) / name).mkdir()
            table.to_csv(hosts.home(name) / name / "customers.csv", index=False)
        assert can_connect(hosts, "hub", "bank")
        for name in MEMBERS:
            hosts.close_inwards(name, "hub", PORT)
        yield hosts


def can_connect(hosts: Hosts, source: str, target: str) -> bool:
    with hosts.enter(target):
        server = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - nobody may reach it
    with server, hosts.enter(source), contextlib.suppress(OSError):
        address = (hosts.addresses[target], server.getsockname()[1])
        socket.create_connection(address, 2.0).close()
        return True
    return False


def test_two_organisations_train_without_a_port_that_others_can_reach(
    hosts: Hosts, tmp_path: Path
) -> None:
    for source, target in (("hub", "bank"), ("hub", "shop"), ("bank", "shop"), ("shop", "bank")):
        assert not can_connect(hosts, source, target)
    story, begun_s = Story(hosts), time.monotonic()
    story.type("hub", f"vfl-server hub --listen 0.0.0.0:{PORT}").wait_for("ready")
    consoles = {}
    url = f"https://{NAMES['hub']}:{PORT}"
    invitations = story.read("hub", f"vfl-server invite {' '.join(MEMBERS)} --url {url}")
    for name, token in (line.split() for line in invitations):
        joining = story.type(name, f"vfl-party join {token} --folder {name}")
        pin = joining.wait_for("text")["text"].split()[-1]
        story.read("hub", f"vfl-server admit {name} --pin {pin}")
        assert joining.wait() == 0, joining.stderr
        with (hosts.home(name) / name / "node.toml").open("a") as file:
            file.write(DATA.format(label=LABELS[name]))
        node = story.type(name, f"vfl-party node {name}/node.toml --console")
        consoles[name] = node.wait_for("ready")["console"]
        node.wait_for("connected")
    (hosts.home("bank") / "recipe.toml").write_text(toml(make_recipe()))
    data = " ".join(f"--data {name}=customers" for name in MEMBERS)
    submit = story.type(
        "bank",
        f"vfl submit recipe.toml {data} --node bank/node --purpose 'churn, contract 17' --wait",
    )
    number = submit.wait_for("text")["text"].strip()
    submit.wait_for("text", text="open: waits for the approval of bank, shop\n")
    for name in MEMBERS:
        with hosts.enter(name), browser() as page:
            story.open(page, consoles[name])
            assert "waits for you" in page.text
            assert "another key" not in page.text
            look(page, tmp_path / f"{name}-proposals.png")
            story.click(page, "standing")
            # The node checks the proposal with its data, and the page loads itself again.
            wait_for(page, "leaves")
            look(page, tmp_path / f"{name}-check.png")
            assert page.findings == []
            story.click(page, "approve")
            wait_for(page, f"{name}: approve")
            look(page, tmp_path / f"{name}-approved.png")
            if name == MEMBERS[-1]:
                wait_for_program(hosts.home(name) / name / "node", number)
                for member in MEMBERS:
                    assert hosts.list_listening(member) <= {"127.0.0.1", "::1"}
                wait_for(page, "done")
                look(page, tmp_path / f"{name}-done.png")
                assert page.findings == []
    assert submit.wait() == 0, submit.stderr
    waited_s = time.monotonic() - begun_s
    print(*story.actions, f"{len(story.actions)} actions, {waited_s:.0f} s", sep="\n")
    for name in MEMBERS:
        (folder,) = hosts.home(name).glob(f"{name}/node/runs/{number[:16]}/*/{name}")
        assert [*folder.glob("checkpoints/*.safetensors")]
        assert (folder / "predictions.parquet").exists() == (name == "bank")
    (summary,) = hosts.home("hub").glob(f"hub/runs/{number[:16]}/*/summary.json")
    assert json.loads(summary.read_text())["metrics"] == simulate(make_recipe()).metrics
    # The time depends on the machine: 43 s on two busy cores.
    assert len(story.actions) <= MAX_ACTIONS


def wait_for_program(folder: Path, number: str) -> None:
    """Waits until the party of a run has reported something."""
    node = NodeClient(folder)
    wait_until(lambda: node.ask(f"/v1/proposals/{number}")["last"], timeout_s=RUN_S)


def wait_for(page: Browser, text: str) -> None:
    """Waits until the page, which loads itself again, has a text."""
    wait_until(lambda: page.text, lambda words: text in words, RUN_S)


def look(page: Browser, path: Path) -> None:
    assert page.overflow <= 0
    assert page.complaints == []
    page.photograph(path)
