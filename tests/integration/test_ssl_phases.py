"""Self-supervised phases at the real programs: faults, bad input, noise, one upload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases, reference_ssvfl
from tests.harness.errors import assert_names, error_line
from tests.harness.federation import Federation, Program
from tests.harness.memory import refused_here, run_here
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_fedhssl import recipe
from tests.integration.test_resume import halfway, held, kill, server_events, wait_for_checkpoints

MLP = {"kind": "mlp", "hidden": [24]}


def run(
    folder: Path, tables: dict[str, Any], data: dict[str, Any]
) -> tuple[dict[str, Any], Federation]:
    with Federation(folder, tables, data) as federation:
        federation.start_all()
        return federation.finish(), federation


def run_with_kill(
    folder: Path, tables: dict[str, Any], data: dict[str, Any], victim: str, at: int
) -> Federation:
    """Kills a process within a step and starts it again; returns the federation, which has ended.

    ``at``: bytes that were sent through the proxy of ``held`` by then.
    """
    with held(folder, tables, data, sent=at) as (federation, proxy):
        wait_for_checkpoints(federation)
        kill(federation, proxy, victim)
        summary = federation.finish()
        # Its new process knows nothing of the end of the old one.
        if victim != "server":
            assert summary["interruptions"] == 1
        started = server_events(federation, "started")
        assert started[-1]["generation"] == 2
        # It went on, and did not begin again.
        assert started[-1]["checkpoint"]
        return federation


def check_kill(tmp_path: Path, tables: dict[str, Any], data: dict[str, Any], victim: str) -> None:
    """Compares the parameters after ``run_with_kill`` with those of an undisturbed run."""
    summary, whole = run_here(tmp_path / "whole", tables, data)
    assert summary["interruptions"] == 0
    killed = run_with_kill(
        tmp_path / "killed", tables, data, victim, halfway(whole.run_folder, whole.names)
    )
    for name in killed.names:
        assert (
            largest_deviation({name: killed.parameters(name)}, {name: whole.parameters(name)})
            == 0.0
        )


@pytest.mark.parametrize(("ssl", "victim"), [("moco", "p1"), ("byol", "p0"), ("simsiam", "server")])
def test_a_killed_process_changes_nothing_bit_for_bit(
    ssl: str, victim: str, tmp_path: Path
) -> None:
    tables = recipe(2, ssl, MLP, rounds=6)
    data = cases.digits(2, limit=220)
    check_kill(tmp_path, tables, data, victim)


@pytest.mark.parametrize(
    ("ssl", "victim", "changed"),
    [
        ("moco", "p1", {"projector": []}),
        # Two groups of parameters, one of which keeps its rate.
        ("simsiam", "p0", {"local_rows": "aligned"}),
    ],
    ids=["no projector", "released"],
)
def test_a_killed_process_changes_nothing_in_variants(
    ssl: str, victim: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(2, ssl, MLP, rounds=6, **changed) | {"task": {"kind": "binary"}}
    tables |= {"preset": "released"} if ssl == "simsiam" else {}
    check_kill(tmp_path, tables, cases.columns("sklearn:breast_cancer", 2, limit=220), victim)


def test_a_killed_party_without_encoder_changes_nothing(tmp_path: Path) -> None:
    tables = cases.recipe(2, task={"kind": "binary"}, phase={"epochs": 6, "batch_size": 16})
    tables["parties"][0] |= {"encoder": {"kind": "raw"}, "embedding_size": 15}
    check_kill(tmp_path, tables, cases.columns("sklearn:breast_cancer", 2, limit=220), "p0")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"gamma": -0.5}, ["gamma"]),
        (
            {"local_rows": "aligned", "local": False, "aggregate": False, "gamma": None},
            ["local_rows", "local = true"],
        ),
        ({"batch_size": 120}, ["batch_size", "120", "p0"]),
        ({"ssl": "simsian"}, ["ssl", "simsiam"]),
        ({"queue": 5000, "ssl": "moco"}, ["queue"]),
        ({"aggregate": True, "local": False, "gamma": None}, ["aggregate", "local = true"]),
        ({"cross": False, "keep": "mean", "gamma": None}, ["keep", "cross = true"]),
        ({"kind": "fedhsl"}, ["'fedhsl'", "fedhssl"]),
    ],
    ids=["gamma", "local_rows", "batch_size", "ssl", "queue", "aggregate", "keep", "kind"],
)
def test_bad_input_is_one_sentence_before_any_training(
    change: dict[str, Any], names: list[str]
) -> None:
    tables = recipe(2, "simsiam", MLP)
    tables["phases"][0] |= change
    tables["phases"][0] = {
        key: value for key, value in tables["phases"][0].items() if value is not None
    }
    refused_here(tables, "p0", cases.digits(2, limit=220)["p0"], *names)


def test_tops_that_differ_between_parties_are_named_at_joining(tmp_path: Path) -> None:
    tables = recipe(2, "simsiam", MLP)
    tables["parties"][1]["encoder"] = {"kind": "mlp", "hidden": [20]}
    with Federation(tmp_path, tables, cases.digits(2, limit=220)) as federation:
        federation.start_all()
        programs = [federation.programs[name] for name in federation.names]
        assert [program.wait(60) for program in programs] == [2, 2]
        sentence = error_line(programs[0].stderr)
    for word in ("p0", "p1", "encoder.3.weight", "[8, 24]", "[8, 20]"):
        assert word in sentence, sentence


def test_rows_of_a_partys_own_are_learnt_from(tmp_path: Path) -> None:
    """``data.unaligned`` adds rows that the others do not have: local self-supervision changes,
    nothing else breaks.
    """
    rows = ["id,a,b,c,d,y"]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(260, 4, generator=generator)
    rows += [
        f"r{n:03d}," + ",".join(f"{v:.4f}" for v in values[n].tolist()) + f",{n % 2}"
        for n in range(260)
    ]
    tables = recipe(2, "simsiam", MLP)
    tables["task"] = {"kind": "binary"}
    found = []
    for extra in (None, "more.csv"):
        data: dict[str, Any] = {
            "p0": {"source": "all.csv", "id": "id", "label": "y", "columns": ["a", "b"]},
            "p1": {"source": "all.csv", "id": "id", "columns": ["c", "d"]},
        }
        if extra:
            data["p1"]["unaligned"] = extra
        folder = tmp_path / str(extra)
        with Federation(folder, tables, data) as federation:
            (folder / "all.csv").write_text("\n".join(rows[:201]) + "\n")
            unlabelled = [row.rpartition(",")[0] for row in (rows[0], *rows[201:])]
            (folder / "more.csv").write_text("\n".join(unlabelled) + "\n")
            federation.start_all()
            federation.finish()
            found.append({name: federation.parameters(name) for name in federation.names})
    without, with_them = (
        {name: t for name, t in each["p1"].items() if "local" in name} for each in found
    )
    assert largest_deviation({"p1": with_them}, {"p1": without}) > 1e-3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("encoder", "projector"),
    [(MLP, [16, 12]), ({"kind": "cnn", "channels": [4, 6]}, [16, 12]), (MLP, [])],
    ids=["mlp", "cnn", "Eq. 2 itself"],
)
def test_ssvfl_i_gives_the_parameters_of_one_process_and_uploads_once(
    encoder: dict[str, Any], projector: list[int], tmp_path: Path, record_property: Any
) -> None:
    tables = recipe(2, "simsiam", encoder)
    tables["rows"] |= {"labelled": 60}
    tables["phases"] = [
        {
            "kind": "contrastive",
            "ssl": "simclr",
            "rounds": 3,
            "batch_size": 32,
            "projector": projector,
            "temperature": 0.2,
        },
        {"kind": "head", "epochs": 4, "batch_size": 16, "optimizer": {"kind": "adam", "lr": 0.01}},
        {"kind": "evaluate"},
    ]
    data = cases.digits(2, limit=220)
    _, federation = run(tmp_path, tables, data)
    got = {name: federation.parameters(name) for name in federation.names}
    worst = largest_deviation(got, reference_ssvfl.train(tables, data))
    record_property("largest_deviation", worst)
    assert worst <= TOLERANCE
    entries = [entry for entry in federation.ledger("p1") if entry.peer == "p0"]
    assert not [entry for entry in entries if entry.phase == "contrastive"]
    (upload,) = [entry for entry in entries if (entry.phase, entry.kind) == ("head", "embedding")]
    # float64, width 8, labelled rows, once.
    assert upload.payload_bytes == 8 * 8 * 60
    assert upload.messages == 1
    assert not [entry for entry in entries if entry.kind == "gradient"]


def test_noise_on_what_the_active_party_sends_changes_the_passive_partys_cross_encoder(
    tmp_path: Path,
) -> None:
    """The same seed twice with noise: the noise is nobody's to repeat. Without the noise the runs
    are equal.
    """
    data, found = cases.digits(2, limit=220), {}
    for amplifier in (0.0, 0.5):
        tables = recipe(2, "simsiam", MLP, rounds=1, iso_embedding=amplifier, iso_weights=amplifier)
        for turn in range(2):
            _, federation = run_here(tmp_path / f"{amplifier}-{turn}", tables, data)
            found[amplifier, turn] = {"p1": federation.parameters("p1")}
    assert largest_deviation(found[0.0, 0], found[0.0, 1]) == 0.0
    assert largest_deviation(found[0.5, 0], found[0.5, 1]) > 1e-3


def test_a_collapse_is_told(tmp_path: Path) -> None:
    """A passive party whose rows are all the same has projections that are: the run says so, and
    which party.
    """
    tables = recipe(2, "simsiam", MLP, rounds=2)
    data = {
        "p0": {"source": "all.csv", "id": "id", "label": "y", "columns": ["a"]},
        "p1": {"source": "all.csv", "id": "id", "columns": ["b"]},
    }
    with Federation(tmp_path, tables | {"task": {"kind": "binary"}}, data) as federation:
        rows = [f"r{n:03d},{n * 37 % 101},1,{n % 2}" for n in range(200)]
        (federation.folder / "all.csv").write_text("\n".join(["id,a,b,y", *rows]) + "\n")
        federation.start_all()
        note = federation.programs["server"].wait_for("note")
        federation.finish()
    assert note["party"] == "p1"
    assert_names(note["note"], "p1")


def test_a_party_that_learns_alone_does_not_repeat_what_it_has_done(tmp_path: Path) -> None:
    """When p0 is killed, p0 resumes from its own checkpoint, p1 from its own, and nothing
    differs.
    """
    tables = recipe(2, "simsiam", MLP, cross=False, aggregate=False, rounds=40)
    del tables["phases"][0]["gamma"]
    tables["phases"].append({"kind": "evaluate"})
    data = cases.digits(2, limit=220)
    _, whole = run_here(tmp_path / "whole", tables, data)
    with Federation(tmp_path / "killed", tables, data) as federation:
        federation.start_all()
        # Neither waits for the other.
        for name in federation.names:
            # The first checkpoint is on its disk by then.
            wait_for_round(federation.programs[name], 3)
        federation.programs["p0"].kill()
        federation.start_party("p0")
        federation.finish()
        resumed = {name: first_round_after_restart(federation, name) for name in federation.names}
        assert min(resumed.values()) > 1, "nobody began again"
        for name in federation.names:
            assert (
                largest_deviation(
                    {name: federation.parameters(name)}, {name: whole.parameters(name)}
                )
                == 0.0
            )


def first_round_after_restart(federation: Federation, name: str) -> int:
    lines = [
        json.loads(line)
        for line in (federation.run_folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    last = max(line["generation"] for line in lines)
    found = [
        int(line["round"])
        for line in lines
        if line["generation"] == last and line["phase"] == "fedhssl"
    ]
    # It had done them all.
    return min(found, default=1 << 30)


def wait_for_round(program: Program, rounds: int) -> None:
    # Ends where the program does.
    while program.wait_for("progress")["round"] < rounds:
        pass
