"""A trained federation of three parties that is served: its programs, and requests to them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd

import vfl
from tests.harness import cases, ports
from tests.harness.federation import Federation, Program
from tests.harness.waiting import wait_until

NAMES = ("p0", "p1", "p2")
ROWS = 120
_READY_S = 150.0


@dataclass
class Served:
    """The programs that serve ``run``, and what they answer."""

    federation: Federation
    run: vfl.Run
    listen: str = field(default_factory=ports.address)
    url: str = ""
    # What is given with --run; empty: ``run``.
    runs: tuple[str, ...] = ()
    # {party: more options of its program}.
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def start(self, name: str, **more: Any) -> Program:
        """Starts a party's program; ``more``: keys of its table ``serve``."""
        own = {"listen": self.listen} if name == "p0" else {"active": self.listen}
        serve = {"refresh_s": 0.2, "party_timeout_ms": 1000, **more}
        # Tests and benchmarks ask much more than people ask about a table of this size.
        own_serve = {"http": "127.0.0.1:0"} if name == "p0" else {"asked_a_day": 1_000_000}
        serve = own_serve | serve
        known = self.federation.extra.get(name, {})
        kept = {key: of for key, of in known.items() if key in ("out", "policy", "pins", "record")}
        self.federation.extra[name] = {**kept, **own, "serve": serve}
        path = self.federation.write_party(name).name
        runs = [word for each in self.runs or (self.run.folder.name,) for word in ("--run", each)]
        return self.federation.start(
            name, "vfl-party", "serve", path, *runs, *self.options.get(name, ())
        )

    def start_all(self, **more: Any) -> None:
        """Starts all parties, and waits until all attend; ``more``: of the active one."""
        active = self.start("p0", **more)
        others = [self.start(name) for name in NAMES[1:]]
        self.url = active.wait_for("ready", _READY_S)["http"]
        for each in others:
            each.wait_for("attending", _READY_S)
        self.wait_for(NAMES[1:])

    def wait_for(self, present: tuple[str, ...], timeout_s: float = _READY_S) -> None:
        """Waits until these passive parties attend, and no others."""
        wait_until(
            lambda: self.get("/healthz")["present"], lambda there: there == [*present], timeout_s
        )

    def program(self, name: str) -> Program:
        return self.federation.programs[name]

    def get(self, path: str) -> Any:
        return self.ask(path)[1]

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        url: str | None = None,
    ) -> tuple[int, Any]:
        """Returns status and answer of a request; ``body``: for JSON, or bytes as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        line = http.client.HTTPConnection(urlsplit(url or self.url).netloc, timeout=30)
        try:
            line.request("GET" if data is None else "POST", path, data, given)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            line.close()

    def rows(self, *ids: str, **more: Any) -> list[dict[str, Any]]:
        """Returns the rows of a prediction."""
        status, answer = self.ask("/v1/predict", {"ids": list(ids), **more})
        assert status == 200, answer
        found: list[dict[str, Any]] = answer["rows"]
        return found


def write_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes the parties' tables; returns their [data]."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 6)).round(4)
    ids = [f"K-{number}" for number in range(ROWS)]
    found = {}
    for at, name in enumerate(NAMES):
        frame = pd.DataFrame({"id": ids, **{f"c{j}": x[:, j] for j in (2 * at, 2 * at + 1)}})
        if name == "p0":
            frame["label"] = (x[:, 0] + x[:, 2] - x[:, 4] > 0).astype(int)
        frame.to_csv(folder / f"{name}.csv", index=False)
        found[name] = {"source": str(folder / f"{name}.csv"), "id": "id"}
    found["p0"]["label"] = "label"
    return found


@contextmanager
def trained(
    folder: Path, *phases: dict[str, Any], data: dict[str, dict[str, Any]] | None = None
) -> Iterator[Served]:
    """Trains in this process, and yields the parties, which are not started yet.

    ``phases``: of the recipe; by default split training, a student and a measurement of subsets.
    ``data``: the parties' [data]; by default those of ``write_tables``.
    """
    recipe = cases.recipe(3, task={"kind": "binary"})
    if phases:
        recipe["phases"] = [*phases]
    else:
        recipe["phases"].append({"kind": "student", "epochs": 2})
        recipe["phases"].append({"kind": "evaluate", "subsets": True, "resamples": 2})
    with federation_of(folder, recipe, data) as federation:
        yield Served(federation, trained_run(federation, folder / "f" / "recipe.toml"))


@contextmanager
def federation_of(
    folder: Path, recipe: dict[str, Any], data: dict[str, dict[str, Any]] | None = None
) -> Iterator[Federation]:
    """Writes the files of a federation with the tables of ``write_tables``, or with ``data``."""
    data = write_tables(folder) if data is None else data
    with Federation(folder / "f", recipe, data) as federation:
        # No server is needed.
        federation.address = "127.0.0.1:1"
        yield federation


def trained_run(federation: Federation, recipe: Path | dict[str, Any]) -> vfl.Run:
    """Trains a recipe in this process, with the tables of its parties."""
    named = federation.recipe if isinstance(recipe, Path) else recipe
    tables = [(each["name"], federation.data[each["name"]]) for each in named["parties"]]
    given = {
        name: vfl.Data(
            table["source"],
            settings={key: value for key, value in table.items() if key != "source"},
        )
        for name, table in tables
    }
    return vfl.simulate(recipe, data=given, out=federation.folder / "runs", quiet=True)
