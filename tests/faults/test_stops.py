"""SIGINT and SIGTERM are orderly stops: the others wait as for a death, and the same command
resumes the run.
"""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.federation import RUN_S, Federation
from tests.integration.test_resume import (
    HANDSHAKE_BYTES,
    Parameters,
    assert_equal,
    held,
    parameters,
)

WIDTH, BATCH, TRAIN, VALIDATION, TEST = 64, 32, 80, 20, 100
DATA = cases.columns("sklearn:breast_cancer", 3, limit=TRAIN + VALIDATION + TEST)
RECIPE = cases.recipe(
    3,
    task={"kind": "binary"},
    rows={"validation": VALIDATION / 200, "test": TEST / 200},
    model={"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [32], "dropout": 0.2}},
    phase={"epochs": 3, "batch_size": BATCH, "optimizer": {"kind": "adam", "lr": 0.01}},
) | {"phases": [{"kind": "splitnn", "epochs": 3, "batch_size": BATCH}, {"kind": "evaluate"}]}
# Bytes of an embedding's row.
ROW = 4 * WIDTH
# Bytes that p2 has sent, by moment.
HOLD = {
    # In the second epoch.
    "training": HANDSHAKE_BYTES + ROW * (TRAIN + VALIDATION + BATCH * 3 // 2),
    "evaluating": HANDSHAKE_BYTES + ROW * (3 * (TRAIN + VALIDATION) + TEST // 2),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    with Federation(tmp_path_factory.mktemp("undisturbed"), RECIPE, DATA) as federation:
        federation.start_all()
        federation.finish()
        return parameters(federation)


def stop(federation: Federation, victim: str, number: signal.Signals) -> None:
    program = federation.programs[victim]
    program.signal(number)
    assert program.wait(20.0) == 130
    assert_names(program.stderr.splitlines()[-1], "stopped")


def start_again(federation: Federation, victim: str) -> None:
    if victim == "server":
        federation.start_server(federation.address)
    else:
        federation.start_party(victim)


def told(federation: Federation, victim: str) -> dict[str, Any]:
    """Waits until the server says that it lacks the victim, or, if the server is the victim, until
    a party does.
    """
    if victim == "server":
        return federation.programs["p1"].wait_for("waiting", missing=["server"])
    found = federation.programs["server"].wait_for("lost", party=victim)
    assert found["how"] == "was stopped"
    return found


@pytest.mark.parametrize(
    ("number", "victim"), [*itertools.product(SIGNALS, ("server", "p0", "p1"))]
)
def test_while_others_have_not_joined(
    number: signal.Signals, victim: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    with Federation(tmp_path, RECIPE, DATA) as federation:
        federation.start_server()
        for name in ("p0", "p1"):
            federation.start_party(name)
            federation.programs["server"].wait_for("joined", party=name)
        stop(federation, victim, number)
        told(federation, victim)
        start_again(federation, victim)
        federation.start_party("p2")
        assert federation.finish()["interruptions"] == 0
        assert_equal(parameters(federation), undisturbed)


@pytest.mark.parametrize(
    ("number", "victim"), [*itertools.product(SIGNALS, ("server", "p0", "p1"))]
)
@pytest.mark.parametrize("moment", HOLD)
def test_within_a_step(
    moment: str, number: signal.Signals, victim: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, RECIPE, DATA, sent=HOLD[moment]) as (federation, proxy):
        federation.wait_for_checkpoint(
            "000001.splitnn.1" if moment == "training" else "000003.splitnn.3"
        )
        stop(federation, victim, number)
        told(federation, victim)
        proxy.release()
        start_again(federation, victim)
        if victim == "p0":
            proxy.target = federation.programs["p0"].wait_for("ready")["address"]
        summary = federation.finish(RUN_S)
        assert summary["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)
        # Each has it in its log.
        for name in federation.names:
            log = (federation.run_folder / name / "log.jsonl").read_text().splitlines()
            event = "stopped" if name == victim else "interrupted"
            (line,) = [each for each in map(json.loads, log) if each.get("event") == event]
            assert name == victim or victim in line["message"]
            assert_names(line["message"], "stopped")
