"""Parties of several processes (torchrun, gloo) get the parameters of one process, and survive the
death of a rank. In float64, where rounding cannot decide which pixel of max pooling gets a gradient.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import cases, ports, reference
from tests.harness.errors import error_line
from tests.harness.federation import BIN, RUN_S, Federation, Program
from tests.harness.memory import run_here
from tests.harness.preloaded import float64, threads
from tests.harness.proxy import Proxy
from tests.harness.sharing import FRESH
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_resume import Parameters, assert_equal, parameters, server_events

pytestmark = pytest.mark.slow

# A last batch of two rows: the third rank gets none.
WIDTH, BATCH, TRAIN, VALIDATION = 64, 26, 80, 10
RANKS = {"p0": 3, "p1": 2}
DATA = cases.digits(2)
RECIPE = cases.recipe(
    2,
    model={
        "embedding_size": WIDTH,
        "encoder": {"kind": "cnn", "channels": [4], "batch_norm": False},
    },
    phase={
        "batch_size": BATCH,
        "optimizer": {
            "kind": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "schedule": "cosine",
            "clip_norm": 1.0,
        },
    },
    # Torchrun and its processes take long to start where others work too.
    run={"rejoin_deadline_s": 5 * RUN_S},
)
TRAINED = RECIPE | {"phases": [*RECIPE["phases"], {"kind": "evaluate"}]}
# Bytes that p1 has sent, 8 a number in float64.
IN_SECOND_EPOCH = 4096 + 8 * WIDTH * (TRAIN + VALIDATION + BATCH * 3 // 2)


def torchrun(federation: Federation, name: str, command: str = "run", *options: str) -> Program:
    """A party as so many processes as RANKS says."""
    path = federation.write_party(name)
    host, _, port = ports.address().rpartition(":")
    static = ("--master-addr", host, "--master-port", port)
    launch = ("torchrun", *static, "--nproc-per-node", str(RANKS[name]), "--no-python", "--")
    return federation.start(name, *launch, str(BIN / "vfl-party"), command, path.name, *options)


@contextmanager
def started(
    folder: Path, *, installed: bool = False, **hold: int
) -> Iterator[tuple[Federation, Proxy]]:
    """Server and parties; p1 reaches p0 through a proxy, which may hold the bytes.

    ``installed``: p1 is the installed torchrun and commands, no forks.
    """
    with (
        Proxy() as proxy,
        Federation(folder, TRAINED, DATA, {"p1": {"active": proxy.address}}) as federation,
    ):
        if hold:
            proxy.hold_at(**hold)
        federation.start_server()
        proxy.target = torchrun(federation, "p0").wait_for("ready")["address"]
        federation.fresh |= installed
        torchrun(federation, "p1")
        yield federation, proxy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parameters, dict[str, Any]]:
    with float64.float64(), started(tmp_path_factory.mktemp("undisturbed")) as (federation, _):
        summary = federation.finish()
        folders = sorted(path.name for path in federation.run_folder.iterdir() if path.is_dir())
        assert folders == ["p0", "p1", "server"]
        return parameters(federation), summary


@pytest.mark.usefixtures("float64")
def test_they_get_the_parameters_of_one_process(
    undisturbed: tuple[Parameters, dict[str, Any]], record_property: Any
) -> None:
    got, summary = undisturbed
    worst = largest_deviation(got, reference.train(RECIPE, DATA))
    record_property("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE
    assert (summary["interruptions"], summary["bytes"]["agrees"]) == (0, True)
    assert [party["device"] for party in summary["parties"]] == ["cpu", "3 x cpu", "2 x cpu"]
    assert {"loss", "accuracy"} <= summary["metrics"]["test"].keys()
    sent = {
        link["kind"]: link["payload_bytes"]
        for link in summary["bytes"]["by_link"]
        # Fmt: skip.
        if (link["sender"], link["phase"]) == ("p1", "splitnn")
    }
    # Rank 0 alone is on the wire.
    assert sent["embedding"] == 3 * 8 * WIDTH * (TRAIN + VALIDATION)


@pytest.mark.skipif(threads.NUMBER > 1, reason="an installed program computes on one thread")
@pytest.mark.usefixtures("float64")
def test_a_rank_is_killed_and_the_party_started_again(
    undisturbed: tuple[Parameters, dict[str, Any]], tmp_path: Path
) -> None:
    with started(tmp_path, installed=True, sent=IN_SECOND_EPOCH) as (federation, proxy):
        proxy.wait_until_held(RUN_S)
        federation.wait_for_checkpoint("000001.splitnn.1")
        party = federation.programs["p1"]
        assert isinstance(party.process, subprocess.Popen)
        ranks = psutil.Process(party.process.pid).children(recursive=True)
        (last,) = [each for each in ranks if each.environ().get("RANK") == "1"]
        last.kill()
        assert party.wait() != 0
        gone, alive = psutil.wait_procs(ranks, timeout=30)
        assert (len(gone) >= 2, alive) == (True, [])
        # Rank 0 ends by itself, and is not aborted by its threads.
        assert "terminate called" not in party.stderr
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        # A fork does to go on with.
        federation.fresh = FRESH
        torchrun(federation, "p1")
        summary = federation.finish()
        assert summary["interruptions"] == 1
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            "000001.splitnn.1",
        ]
        assert_equal(parameters(federation), undisturbed[0])


SMALL = {"optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.5}, "batch_size": 26}
VIEWS = SMALL | {"rounds": 2, "projector": [8], "queue": 40, "momentum": 0.9}
WITHOUT_LABELS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    # An encoder with a bound of its own, and one beside it.
    "columns": (
        cases.columns("sklearn:breast_cancer", 2, limit=100),
        {"encoder": {"kind": "mlp", "hidden": [8], "batch_norm": False}},
        [
            {"kind": "fedonce", "epochs": 2, **SMALL},
            {"kind": "contrastive", "ssl": "moco", **VIEWS},
            {"kind": "fedonce", "name": "rows", "objective": "reconstruction", "epochs": 2}
            | {"output": "tanh", "rows": "local", **SMALL},
            {"kind": "fedhssl", "ssl": "moco", "keep": "cross", "local_updates": 2, **VIEWS}
            # The encoder that counts names no layers for it.
            | {"aggregate": False},
        ],
    ),
    "estimates": (
        cases.columns("sklearn:breast_cancer", 2, limit=100),
        {"encoder": {"kind": "mlp", "hidden": [8], "batch_norm": False}},
        [
            {"kind": "fedcvt", "epochs": 2, "warmup": 0.5, "unlabelled_batch_size": 8}
            | {"own_batch_size": 10, **SMALL, "batch_size": 16},
            {"kind": "student", "epochs": 1, **SMALL},
        ],
    ),
    # Two encoders, of which later phases get the mean, and a view of each batch.
    "images": (
        DATA,
        {"encoder": {"kind": "cnn", "channels": [4], "batch_norm": False}},
        [
            {"kind": "fedhssl", "ssl": "byol", **VIEWS},
            {"kind": "splitnn", "epochs": 1, "augment": {"flip": 0.5, "blur": 0.5}, **SMALL},
        ],
    ),
}
# Notes each batch, but not what is embedded to look at an encoder.
COUNTED = """
import os
import torch
class Counted(torch.nn.Module):
    def __init__(self, spec, width):
        super().__init__()
        self.layer = torch.nn.Linear(spec.shape[0], width)
    def forward(self, x):
        if len(x) > 2:
            with open("passes-" + os.environ.get("RANK", "alone"), "a") as file:
                print(len(x), file=file)
        return torch.tanh(self.layer(x))
"""


def passes(folder: Path, who: str) -> list[int]:
    return [int(line) for line in (folder / f"passes-{who}").read_text().split()]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", WITHOUT_LABELS)
def test_phases_without_labels_get_the_parameters_of_one_process(
    case: str, tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model, phases = WITHOUT_LABELS[case]
    of_images = case == "images"
    tables = cases.recipe(
        2,
        task=None if of_images else {"kind": "binary"},
        model=model,
        rows={"aligned": 0.6, "labelled": 30} if case == "estimates" else None,
    ) | {"phases": phases}
    extra: dict[str, dict[str, Any]] = {}
    if not of_images:
        tables["parties"][1]["encoder"] = {"kind": "custom", "factory": "counted:Counted"}
        extra = {name: {"allow_code": ["counted"]} for name in data}
        for folder in (tmp_path, tmp_path / "ranks"):
            folder.mkdir(exist_ok=True)
            (folder / "counted.py").write_text(COUNTED)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "counted", raising=False)
    _, alone = run_here(tmp_path / "alone", tables, data)
    federation = Federation(tmp_path / "ranks", tables, data, extra)
    with federation:
        federation.start_server()
        federation.start_party("p0")
        torchrun(federation, "p1")
        summary = federation.finish()
    assert [party["device"] for party in summary["parties"]] == ["cpu", "cpu", "2 x cpu"]
    worst = largest_deviation(parameters(federation), parameters(alone))
    record_property("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE
    if not of_images:
        halves = [passes(federation.folder, rank) for rank in ("0", "1")]
        whole = passes(alone.folder, "alone")
        # Each rank has half of every batch, in all phases.
        assert halves == [[(rows + 1) // 2 for rows in whole], [rows // 2 for rows in whole]]
        assert len(whole) > 10
    if of_images:
        scores_of_one_process(federation)


def scores_of_one_process(federation: Federation) -> None:
    """Predicts with p1 as two processes, and as one."""
    run = federation.run_folder.name
    found = []
    for number, start in enumerate((torchrun, one)):
        federation.programs.clear()
        federation.server_options = ("--predict",)
        with federation:
            federation.start_server()
            out = ("--out", f"scores-{number}.csv")
            one(federation, "p0", "predict", "--run", f"runs/{run}", *out)
            start(federation, "p1", "predict", "--run", f"runs/{run}")
            for name, program in federation.programs.items():
                assert program.wait(RUN_S) == 0, f"{name}: {program.stderr}"
        with (federation.folder / out[1]).open() as file:
            found.append(list(csv.DictReader(file)))
    assert len(found[0]) == len(found[1]) == 100
    numbers = [name for name in found[0][0] if name.startswith("score_")]
    assert len(numbers) == 10
    for ours, theirs in zip(*found, strict=True):
        assert all(abs(float(ours[name]) - float(theirs[name])) <= TOLERANCE for name in numbers)


def one(federation: Federation, name: str, command: str, *options: str) -> Program:
    """A party as one process."""
    path = federation.write_party(name)
    return federation.start(name, "vfl-party", command, path.name, *options)


def test_a_phase_of_one_process_is_refused_before_joining(tmp_path: Path) -> None:
    tables = RECIPE | {"phases": [{"kind": "fedonce", "epochs": 1}, {"kind": "head", "epochs": 1}]}
    # Nobody is there, and none is asked.
    with Federation(tmp_path, tables, DATA, address="127.0.0.1:1") as federation:
        program = torchrun(federation, "p1")
        assert program.wait() != 0
    line = error_line(program.stderr)
    assert line.startswith(f"error: {tmp_path}/recipe.toml: phases: head: ")
    # But for the party's record.
    assert not [*(tmp_path / "runs").glob("[!.]*")]
