"""Parties that compute with other instruction sets: a party is killed and comes back on another
machine, or a federation has several machines from its start.

The older machine of ``tests.harness.sharing`` is this one with environment variables by which MKL,
oneDNN and ATen compute without AVX2.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from tests.harness import cases
from tests.harness.federation import BIN, RUN_S, Federation, Program
from tests.harness.kills import Killed, plugged
from tests.harness.memory import run_here
from tests.harness.sharing import FRESH, MACHINES, OLDER
from tests.integration import (
    test_fedcvt,
    test_fedhssl,
    test_fedonce,
    test_secureboost,
    test_student,
)
from tests.integration.test_exact import ROUNDING, largest_deviation
from tests.integration.test_resume import DATA, Parameters, parameters
from tests.integration.test_resume import recipe as with_all_state
from vfl_common.process.logs import format_arithmetic

_OLDER = MACHINES[OLDER]
pytestmark = pytest.mark.skipif(
    _OLDER.items() <= os.environ.items(), reason="this machine has the older one's settings"
)

Tables = dict[str, Any]
EVALUATE = {"kind": "evaluate"}
SPLITNN = {"kind": "splitnn", "epochs": 4, "batch_size": 24}


def _fedhssl() -> Tables:
    tables = test_fedhssl.recipe(2, "moco", {"kind": "mlp", "hidden": [24]})
    tables["phases"].append(SPLITNN)
    return tables


def _contrastive() -> Tables:
    tables = test_fedhssl.recipe(2, "simsiam", {"kind": "mlp", "hidden": [24]})
    tables["rows"] |= {"labelled": 60}
    first = {"kind": "contrastive", "ssl": "simclr", "rounds": 4, "batch_size": 32}
    head = {"kind": "head", "epochs": 4, "batch_size": 16, "optimizer": test_fedonce.ADAM}
    return tables | {"phases": [first, head, EVALUATE]}


def _splitnn() -> Tables:
    tables = with_all_state()
    tables["phases"].append(EVALUATE)
    return tables


@dataclass(frozen=True)
class Case:
    """A run in which parties die and come back on the older machine.

    ``deaths``: (who dies, the checkpoint that it has just written), in the order of time. Before
    the first of these checkpoints there is another one, which all parties hold.
    ``tolerance``: between the weights, and the scores, of this run and an undisturbed one. It is
    that of the method's comparison with one process, which sums in another order, too. Encoders of
    columns have tanh for ReLU: where an input of ReLU is nearly 0, rounding decides about the
    gradient, and no tolerance is right (2.9e-4 was measured with ``contrastive``).
    """

    tables: Tables
    data: Tables
    deaths: tuple[tuple[str, str], ...]
    tolerance: float = ROUNDING

    @property
    def smooth(self) -> Tables:
        """The recipe with smooth encoders, in which parties wait long enough for each other."""
        model = self.tables["model"]
        encoder = model.get("encoder", {})
        if encoder.get("kind") == "mlp":
            model = model | {"encoder": encoder | {"activation": "tanh"}}
        return self.tables | {
            "model": model,
            "run": self.tables["run"] | {"rejoin_deadline_s": RUN_S},
        }


BINARY = cases.columns("sklearn:breast_cancer", 2, limit=150)
CASES = {
    # Batch normalisation divides by small deviations, and Adam by small moments.
    "splitnn, evaluate": Case(
        _splitnn(), DATA, (("p1", "splitnn.2."), ("p0", "splitnn.4.")), 10 * ROUNDING
    ),
    "fedhssl, splitnn": Case(
        _fedhssl(), cases.digits(2, limit=220), (("p1", "fedhssl.2."), ("p0", "splitnn.2."))
    ),
    "contrastive, head, evaluate": Case(
        _contrastive(), cases.digits(2, limit=220), (("p1", "contrastive.2."), ("p0", "head.1."))
    ),
    "fedonce, head, evaluate": Case(
        test_fedonce.recipe(2, "binary"),
        BINARY,
        (("p1", "fedonce.2."), ("p0", "head.1.")),
        10 * ROUNDING,
    ),
    "mocosfl, probe": Case(
        cases.own_rows_recipe(2, epochs=4, then=(cases.PROBE,)),
        cases.own_rows(2),
        (("p1", "mocosfl.2."), ("p0", "mocosfl.4.")),
    ),
    "fedcvt": Case(
        test_fedcvt.recipe(), test_fedcvt.DATA["binary"], (("p1", "fedcvt.2."), ("p0", "fedcvt.4."))
    ),
    "student": Case(
        test_student.recipe("binary", match=0.3),
        test_student.data("binary"),
        (("p1", "splitnn.2."), ("p0", "student.1.")),
    ),
    "secureboost": Case(
        test_secureboost.recipe(2, {"kind": "binary"}),
        BINARY,
        (("p1", "secureboost.2."), ("p0", "secureboost.4.")),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def older(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Waits until the older machine can start programs: no party shall wait for its launcher."""
    program = Program(
        "p0",
        [str(BIN / "vfl-party"), "--version"],
        tmp_path_factory.mktemp("older"),
        fresh=FRESH,
        machine=OLDER,
    )
    try:
        assert program.wait() == 0, program.stderr
    finally:
        program.close()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return plugged(tmp_path_factory.mktemp("site"))


def finish_moved(federation: Killed, deaths: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Runs a federation in which each party that dies comes back on the older machine; returns the
    summary.
    """
    for name, checkpoint in deaths:
        (federation.folder / f"kill-checkpoint-named-{name}").write_text(checkpoint)
    for name in ("server", *federation.names):
        federation.start_one(name)
    for name, _ in deaths:
        program = federation.programs[name]
        assert program.wait() == -signal.SIGKILL, program.stderr
        federation.machines[name] = OLDER
        federation.start_one(name)
    return federation.finish()


def numbers(value: Any) -> list[float]:
    """Returns all numbers of a JSON value, in order."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


def weights(federation: Federation) -> Parameters:
    """Returns {party: {name: tensor}}; of trees, which are JSON, all numbers."""
    return {
        party: {
            name: torch.tensor(numbers(json.loads(bytes(of.numpy()))), dtype=torch.float64)
            if name.endswith("_extra_state")
            else of
            for name, of in tensors.items()
        }
        for party, tensors in parameters(federation).items()
    }


def scores(federation: Federation) -> Parameters:
    """Returns {file of predictions: {column: its numbers}} of the active party."""
    found = {}
    for path in sorted((federation.run_folder / "p0").glob("*predictions*.parquet")):
        table = pyarrow.parquet.read_table(path)
        found[path.name] = {
            name: torch.tensor(table[name].to_pylist(), dtype=torch.float64)
            for name in table.column_names
            if name.startswith("score")
        }
    return found


def warnings(federation: Federation, name: str) -> list[dict[str, Any]]:
    """Returns the lines of a party's log about its arithmetic."""
    lines = (federation.run_folder / name / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("event") == "arithmetic"]


def changes(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns {party: its resumes with other arithmetic, as the summary has them}."""
    parties = {each["name"]: each["arithmetic"] for each in summary["parties"]}
    assert parties.pop("server") is None
    return {name: each["changes"] for name, each in parties.items()}


@pytest.mark.parametrize("case", list(CASES))
def test_a_party_that_comes_back_on_another_machine_ends_the_run_to_rounding(
    case: str, tmp_path: Path, plugin: dict[str, str], record_property: Any
) -> None:
    of = CASES[case]
    tables = of.smooth
    calm, whole = run_here(tmp_path / "whole", tables, of.data)
    assert not any(changes(calm).values())
    with Killed(tmp_path / "moved", tables, of.data) as federation:
        federation.plugin = plugin
        found = changes(finish_moved(federation, of.deaths))
        worst = largest_deviation(weights(federation), weights(whole))
        worst_score = largest_deviation(scores(federation), scores(whole))
        record_property("largest_deviation", worst)
        print(f"{case}: weights {worst:.3g}, scores {worst_score:.3g}")
        assert max(worst, worst_score) <= of.tolerance
        for name in federation.names:
            told = warnings(federation, name)
            shown = [e for e in federation.programs[name].seen() if e["event"] == "arithmetic"]
            if name not in dict(of.deaths):
                assert (told, shown, found[name]) == ([], [], [])
                continue
            # A generation that ended before the next checkpoint may have said it, too.
            assert len(found[name]) == 1
            assert len(shown) >= 1
            (differs,) = {tuple(each["differs"]) for each in [*told, *shown, *found[name]]}
            for variable, value in _OLDER.items():
                before = os.environ.get(variable, "none")
                assert value == before or f"{variable}: {value}, was {before}" in differs
            for each, event in zip(told, shown, strict=True):
                assert each["level"] == "warning"
                assert each["checkpoint"] == event["checkpoint"]
                assert each["message"] == format_arithmetic(each["checkpoint"], differs)


def test_a_federation_of_two_machines_agrees_with_one_process_to_rounding(tmp_path: Path) -> None:
    tables = CASES["splitnn, evaluate"].smooth
    _, whole = run_here(tmp_path / "whole", tables, DATA)
    with Federation(tmp_path / "mixed", tables, DATA, machines={"p2": OLDER}) as federation:
        federation.start_all()
        summary = federation.finish()
        # The machines differ, and no party has changed its own.
        assert not any(changes(summary).values())
        used = {each["name"]: each["arithmetic"] for each in summary["parties"][1:]}
        assert used["p0"] == used["p1"] != used["p2"]
        worst = largest_deviation(weights(federation), weights(whole))
        print(f"mixed: weights {worst:.3g}")
        assert worst <= 10 * ROUNDING
