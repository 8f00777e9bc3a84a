"""A standing federation of real programs: a hub and the nodes of its members."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import vfl
from tests.harness.federation import RUN_S, Program, toml
from tests.harness.ports import address
from vfl.certs import authority
from vfl_common.identity import pem
from vfl_hub.library import NodeClient
from vfl_hub.store import Store, open_store

BIN = Path(sys.executable).parent
HUB, MEMBERS = "server", ("bank", "shop")
ROWS = 240


def make_recipe(name: str = "standing", epochs: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [8]}},
        "phases": [
            {"kind": "splitnn", "epochs": epochs, "batch_size": 32},
            {"kind": "evaluate"},
        ],
        **more,
    }


def make_tables() -> dict[str, pd.DataFrame]:
    x = np.random.default_rng(5).normal(size=(ROWS, 4)).round(6)
    frames = {
        "bank": pd.DataFrame(x[:, :2], columns=["a", "b"]).assign(y=(x.sum(1) > 0).astype(int)),
        "shop": pd.DataFrame(x[:, 2:], columns=["c", "d"]),
    }
    return {name: frame.assign(id=range(ROWS)) for name, frame in frames.items()}


def simulate(recipe: dict[str, Any]) -> vfl.Run:
    """Returns the same run on one machine. All random numbers come from the recipe's seed."""
    tables = make_tables()
    data = {"bank": vfl.Data(tables["bank"], label="y"), "shop": vfl.Data(tables["shop"])}
    return vfl.simulate(recipe, data, quiet=True)


class Standing:
    """The hub and the nodes, with members that have joined already."""

    def __init__(
        self,
        folder: Path,
        *,
        joined: bool = True,
        max_runs: int = 4,
        database: str = "",
        age_days: int = 0,
    ) -> None:
        self.folder, self.address, self._database = folder, address(), database
        self._issued = datetime.now(UTC) - timedelta(days=age_days)
        self.url, self._max_runs = f"https://{self.address}", max_runs
        self.hub: Program | None = None
        self.nodes: dict[str, Program] = {}
        self.certs = folder / "hub" / "certs"
        for name, frame in make_tables().items():
            frame.to_csv(folder / f"{name}.csv", index=False)
        if joined:
            authority.create_authority(self.certs, "vfl")
            authority.issue(self.certs, HUB, now=self._issued)
            store = open_store(folder / "hub", database)
            for name in MEMBERS:
                self.add_member(store, name)
            store.close()

    def add_member(self, store: Store, name: str) -> None:
        certs = self.folder / name / "certs"
        authority.issue(self.certs, name, out=certs, now=self._issued)
        authority.give_ca(self.certs, certs)
        store.add_member(name, self.pin(certs / f"{name}.pem"), ["main"])
        self.write_node(name)

    @staticmethod
    def pin(path: Path) -> str:
        return pem.compute_pin(pem.parse_certificates(pem.read(path), path)[0])

    def write_node(self, name: str, approval: str = "automatic", **more: Any) -> Path:
        party: dict[str, Any] = {
            "data": {
                "source": f"../{name}.csv",
                "id": "id",
                **({"label": "y"} if name == "bank" else {}),
            },
            "init": "recipe",
            **more.pop("party", {}),
        }
        tables = {
            "name": name,
            "hub": self.url,
            "hub_pin": self.pin(self.certs / f"{HUB}.pem"),
            "tls": {
                "ca": "certs/ca.pem",
                "certificate": f"certs/{name}.pem",
                "key": f"certs/{name}.key",
            },
            "data": {
                "main": {"approval": approval, "proposers": [*MEMBERS], "party": party},
            },
            **more,
        }
        path = self.folder / name / "node.toml"
        path.write_text(toml(tables))
        return path

    def run(self, name: str, *args: str) -> Program:
        return Program(name, [str(BIN / args[0]), *args[1:]], self.folder)

    def start_hub(self) -> None:
        args = ["--folder", str(self.folder / "hub"), "--listen", self.address]
        args += ["--database", self._database] if self._database else []
        self.hub = self.run("hub", "vfl-server", "hub", *args, "--max-runs", str(self._max_runs))
        self.hub.wait_for("ready")

    def start_node(self, name: str) -> None:
        self.nodes[name] = self.run(name, "vfl-party", "node", f"{name}/node.toml")
        self.nodes[name].wait_for("ready")

    def start(self) -> Standing:
        self.start_hub()
        for name in MEMBERS:
            self.start_node(name)
        for node in self.nodes.values():
            node.wait_for("connected")
        return self

    def ask(self, name: str, path: str, value: Any = None) -> Any:
        return NodeClient(self.folder / name / "node").ask(path, value)

    def submit(self, recipe: dict[str, Any], by: str = "bank") -> str:
        client = NodeClient(self.folder / by / "node")
        return client.submit(recipe, dict.fromkeys(MEMBERS, "main"))

    def row(self, number: str, at: str = "bank") -> dict[str, Any]:
        rows = [row for row in self.ask(at, "/v1/proposals") if row["id"] == number]
        return dict(rows[0]) if rows else {"state": "", "votes": {}, "last": {}}

    def wait(
        self,
        number: str,
        reached: Callable[[dict[str, Any]], bool],
        at: str = "bank",
        timeout_s: float = RUN_S,
    ) -> dict[str, Any]:
        give_up_s = time.monotonic() + timeout_s
        while not reached(row := self.row(number, at)):
            assert row["state"] != "failed", row["reason"]
            assert time.monotonic() < give_up_s, (row, self.hub and self.hub.stderr)
            time.sleep(0.05)
        return row

    def wait_for_state(self, number: str, *states: str, at: str = "bank") -> dict[str, Any]:
        return self.wait(number, lambda row: row["state"] in states, at)

    def read_summary(self, number: str) -> dict[str, Any]:
        (path,) = (self.folder / "hub" / "runs" / number[:16]).glob("*/summary.json")
        return dict(json.loads(path.read_text()))

    def close(self) -> None:
        for program in (*self.nodes.values(), *filter(None, [self.hub])):
            program.close()
