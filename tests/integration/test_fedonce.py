"""FedOnce between processes: the parameters of one process, one upload, and faults in the middle of
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases, reference, reference_fedonce
from tests.harness.errors import assert_names
from tests.harness.federation import Federation
from tests.harness.kills import Killed, killed, plugged
from tests.harness.memory import refused_here, run_here
from tests.harness.proxy import Proxy
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_resume import (
    HANDSHAKE_BYTES,
    assert_equal,
    held,
    parameters,
    server_events,
)

ADAM = {"kind": "adam", "lr": 3e-3, "weight_decay": 1e-4}
TASKS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary"},
    "multiclass": {"kind": "multiclass", "classes": 10},
    "regression": {"kind": "regression"},
}


def recipe(parties: int, task: str, **local: Any) -> dict[str, Any]:
    tables = cases.recipe(
        parties, task=TASKS[task], model={"embedding_size": 3, "top": {"hidden": [8]}}
    )
    tables["model"]["encoder"] = {"kind": "mlp", "hidden": [12]}
    fedonce = {"kind": "fedonce", "epochs": 4, "batch_size": 24, "optimizer": ADAM} | local
    head = {
        "kind": "head",
        "epochs": 3,
        "batch_size": 24,
        "own_encoder": "trained",
        "optimizer": ADAM,
    }
    tables["phases"] = [fedonce, head, {"kind": "evaluate"}]
    return tables


def data(parties: int, task: str, limit: int = 110) -> dict[str, dict[str, Any]]:
    if task == "multiclass":
        return cases.digits(parties, limit=limit)
    if task == "binary":
        return cases.columns("sklearn:breast_cancer", parties, limit=limit)
    found = cases.columns("sklearn:diabetes", parties + 1, limit=limit)
    # Not the last part but one: rows that are alike in s3 and s4 tie, and rounding decides which
    # target each gets.
    found[f"p{parties - 1}"] = found.pop(f"p{parties}")
    found[cases.ACTIVE]["label_scale"] = "minmax"
    return found


def run(
    folder: Path, tables: dict[str, Any], tables_of: dict[str, Any]
) -> tuple[dict[str, Any], Federation]:
    with Federation(folder, tables, tables_of) as federation:
        federation.start_all()
        return federation.finish(), federation


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("parties", [2, 4])
def test_parameters_and_bytes_are_those_of_the_paper(
    parties: int, task: str, tmp_path: Path, record_property: Any
) -> None:
    tables, tables_of = recipe(parties, task), data(parties, task)
    summary, federation = (run if parties == 2 else run_here)(tmp_path, tables, tables_of)
    want = reference_fedonce.train(tables, tables_of)
    worst = largest_deviation(parameters(federation), want)
    record_property("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE
    names = {"regression": {"rmse", "rmse_scaled"}}.get(task, {"accuracy"})
    assert names <= summary["metrics"]["test"].keys()
    n, d = 110 - 2 * 11, 3
    for name in federation.names:
        if name == cases.ACTIVE:
            continue
        entries = [entry for entry in federation.ledger(name) if entry.peer == cases.ACTIVE]
        assert not [
            entry for entry in entries if entry.phase == "fedonce" or entry.kind == "gradient"
        ]
        upload, answer = sorted(
            (each for each in entries if each.phase == "head"), key=lambda each: each.kind
        )[::-1]
        assert (upload.kind, upload.direction, upload.messages) == ("embedding", "sent", 1)
        # 8 bytes a number, in float64.
        assert upload.payload_bytes == 8 * n * d
        assert (answer.kind, answer.direction, answer.messages, answer.payload_bytes) == (
            "ack",
            "received",
            1,
            0,
        )
    assert summary["bytes"]["by_phase"]["head"]["payload_bytes"] == 8 * n * d * (parties - 1)
    assert summary["bytes"]["agrees"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("own_encoder", ["trained", "frozen"])
def test_the_active_partys_columns_go_into_the_model_as_they_are(
    own_encoder: str, tmp_path: Path
) -> None:
    """FedOnce's host model takes x¹ itself: in processes, in memory, and in the reference."""
    tables, tables_of = recipe(2, "binary"), data(2, "binary")
    tables["parties"][0] |= {"encoder": {"kind": "raw"}, "embedding_size": 15}
    tables["phases"][1]["own_encoder"] = own_encoder
    _, apart = run(tmp_path / "apart", tables, tables_of)
    _, here = run_here(tmp_path / "here", tables, tables_of)
    assert_equal(parameters(apart), parameters(here))
    # 15 columns and 3 numbers of the other party.
    assert parameters(here)["p0"]["top.0.weight"].shape == (8, 18)
    want = reference_fedonce.train(tables, tables_of)
    assert largest_deviation(parameters(here), want) <= TOLERANCE


@pytest.mark.usefixtures("float64")
def test_an_active_party_without_encoder_is_trained_with_split_training(tmp_path: Path) -> None:
    tables, tables_of = recipe(2, "binary"), data(2, "binary")
    tables["parties"][0] |= {"encoder": {"kind": "raw"}, "embedding_size": 15}
    tables["phases"][:2] = [
        {"kind": "splitnn", "epochs": 2, "batch_size": 24, "optimizer": {"kind": "sgd", "lr": 0.1}}
    ]
    _, federation = run_here(tmp_path, tables, tables_of)
    want = reference.train(tables, tables_of)
    assert largest_deviation(parameters(federation), want) <= TOLERANCE


@pytest.mark.parametrize(
    ("party", "change", "names"),
    [
        (1, {}, ["p1", "raw", "active party"]),
        (0, {"embedding_size": 14}, ["p0", "15", "embedding_size"]),
        (0, {"active": True}, ["raw", "no weights"]),
    ],
    ids=["passive", "width", "pretraining"],
)
def test_no_encoder_is_only_for_an_active_party_that_states_its_columns(
    party: int, change: dict[str, Any], names: list[str]
) -> None:
    tables = recipe(2, "binary")
    raw = {"encoder": {"kind": "raw"}, "embedding_size": 15}
    tables["parties"][party] |= raw | change.copy()
    if tables["parties"][party].pop("active", False):
        tables["phases"][0]["active"] = True
    refused_here(tables, f"p{party}", data(2, "binary")[f"p{party}"], *names)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "local",
    [{"match_every": 3, "epochs": 5}, {"matching": False}],
    ids=["every third epoch", "fixed targets"],
)
def test_images_end_in_a_linear_layer_and_targets_may_rest(
    local: dict[str, Any], tmp_path: Path
) -> None:
    tables, tables_of = recipe(2, "multiclass", **local), data(2, "multiclass")
    tables["model"]["encoder"] = {"kind": "cnn", "channels": [4], "batch_norm": False}
    _, federation = run_here(tmp_path, tables, tables_of)
    assert (
        largest_deviation(parameters(federation), reference_fedonce.train(tables, tables_of))
        <= TOLERANCE
    )


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "pca"},
        {"objective": "reconstruction", "epochs": 2},
        {"objective": "contrastive", "epochs": 2, "batch_size": 32, "projector": [16, 12]},
    ],
    ids=lambda change: str(change["objective"]),
)
def test_other_objectives_run_and_split_training_goes_on_from_them(
    change: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(2, "binary")
    tables["phases"][0] = {"kind": "fedonce", "active": True} | change
    tables["phases"][1]["noise"] = 0.1
    tables["phases"].insert(
        2, {"kind": "splitnn", "epochs": 9, "batch_size": 24, "max_bytes": 2 * 4 * 3 * 100}
    )
    summary, federation = run_here(tmp_path, tables, data(2, "binary"))
    assert "accuracy" in summary["metrics"]["test"]
    (gradients,) = [entry for entry in federation.ledger("p1") if entry.kind == "gradient"]
    # 100 rows are reached in the first step of the second epoch.
    assert gradients.payload_bytes == 4 * 3 * (88 + 24)


def test_components_beyond_those_of_a_party_are_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = recipe(2, "binary")
    tables["phases"][0] = {"kind": "fedonce", "objective": "pca"}
    tables["model"] |= {"embedding_size": 20, "encoder": {"kind": "mlp"}}
    summary, federation = run_here(tmp_path, tables, data(2, "binary"))
    assert "accuracy" in summary["metrics"]["test"]
    encoder = parameters(federation)["p1"]
    (weight,) = [each for name, each in encoder.items() if name.endswith("weight")]
    (bias,) = [each for name, each in encoder.items() if name.endswith("bias")]
    # p1 has 15 of the 30 columns.
    assert weight.shape == (20, 15)
    eye = torch.eye(15, dtype=weight.dtype)
    assert torch.allclose(weight[:15] @ weight[:15].T, eye, atol=1e-5)
    assert not weight[15:].any()
    assert not bias[15:].any()
    notes = [each.getMessage() for each in caplog.records if "principal components" in each.msg]
    assert len(notes) == 1
    assert_names(notes[0], "embedding_size", "p1")


def test_predictions_come_from_the_encoders_as_they_were_learnt(tmp_path: Path) -> None:
    """p1's encoder is rebuilt with its tanh; without noise the scores are those of the trained
    weights.
    """
    tables, tables_of = recipe(2, "binary"), data(2, "binary")
    _, federation = run(tmp_path, tables, tables_of)
    weights, folder = parameters(federation), federation.run_folder.name
    federation.programs.clear()
    federation.server_options = ("--predict",)
    with federation:
        federation.start_server()
        for name in federation.names:
            path = federation.write_party(name).name
            federation.start(name, "vfl-party", "predict", path, "--run", f"runs/{folder}")
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"
    lines = (federation.folder / "predictions.csv").read_text().splitlines()[1:]
    got = torch.tensor([float(line.split(",")[3]) for line in lines])
    assert torch.allclose(got, reference_fedonce.predict(tables, tables_of, weights), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"objective": "pca", "match_every": 2}, ["match_every", "pca"]),
        ({"batch_size": 5000}, ["batch_size", "4096"]),
        ({"matching": False, "match_every": 2}, ["match_every", "matching"]),
    ],
    ids=["pca", "batch", "matching"],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], names: list[str]) -> None:
    tables = recipe(2, "binary")
    tables["phases"][0] = {"kind": "fedonce"} | change
    refused_here(tables, "p0", data(2, "binary")["p0"], *names)


WIDE = 4096
# Of 200 rows, 160 for training.
UPLOAD_BYTES = 4 * WIDE * 160


def wide() -> dict[str, Any]:
    """Uploads of 2.5 MiB, so that a fault can be put in the middle of one; dropout, to draw random
    numbers.
    """
    tables = recipe(3, "binary", epochs=3)
    tables["model"] |= {
        "embedding_size": WIDE,
        "encoder": {"kind": "mlp", "hidden": [12], "dropout": 0.2},
    }
    return tables


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_a_fault_in_the_middle_of_the_upload_changes_nothing(fault: str, tmp_path: Path) -> None:
    tables, tables_of = wide(), cases.columns("sklearn:breast_cancer", 3, limit=200)
    summary, whole = run_here(tmp_path / "whole", tables, tables_of)
    assert summary["interruptions"] == 0
    with held(tmp_path / fault, tables, tables_of, sent=HANDSHAKE_BYTES + UPLOAD_BYTES // 2) as (
        federation,
        proxy,
    ):
        if fault == "cut":
            proxy.cut()
        else:
            # p0 and p1 may still be learning.
            federation.wait_for_checkpoint("000003.fedonce.3")
            federation.programs["p2"].kill()
            federation.programs["server"].wait_for("interrupted")
        proxy.release()
        if fault == "killed":
            federation.start_party("p2")
        summary = federation.finish()
        assert summary["interruptions"] == (fault == "killed")
        started = server_events(federation, "started")
        assert [event["checkpoint"] for event in started] == ["", "000003.fedonce.3"][
            : len(started)
        ]
        assert_equal(parameters(federation), parameters(whole))
        uploads = {
            name: uploaded(federation, name, peer) for name, peer in (("p2", "p0"), ("p0", "p2"))
        }
    # It goes on after what p0 had read by then; both ends count what was lost on the way too.
    if fault == "cut":
        assert UPLOAD_BYTES <= uploads["p0"] <= uploads["p2"] <= 2 * UPLOAD_BYTES


def uploaded(federation: Federation, name: str, peer: str) -> int:
    """Payload bytes of the upload on the link with ``peer``, as ``name`` counted them."""
    found = [
        entry for entry in federation.ledger(name) if (entry.peer, entry.phase) == (peer, "head")
    ]
    return sum(entry.payload_bytes for entry in found if entry.kind == "embedding")


def once(epochs: int, **head: Any) -> dict[str, Any]:
    """No phase after the upload but the active party's training."""
    tables = recipe(3, "binary")
    tables["phases"] = tables["phases"][:2]
    tables["phases"][1] |= {"epochs": epochs} | head
    return tables


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("killed", ["p0", "server"])
def test_passive_parties_leave_after_the_upload_and_nobody_needs_them(
    killed: str, tmp_path: Path
) -> None:
    tables, tables_of = once(400), data(3, "binary")
    with Federation(tmp_path, tables, tables_of) as federation:
        server = federation.start_server()
        address = federation.address
        for name in federation.names:
            federation.start_party(name)
        for name in ("p1", "p2"):
            assert federation.programs[name].wait() == 0
            server.wait_for("left")
        # In the midst of its training.
        assert federation.programs["p0"].process.poll() is None
        assert "completed" not in {event["event"] for event in server.events}
        federation.programs[killed].kill()
        if killed == "server":
            federation.start_server(address)
        else:
            server.wait_for("interrupted")
            federation.start_party("p0")
        summary = federation.finish()
        assert [party["name"] for party in summary["parties"]] == ["server", "p0", "p1", "p2"]
        # Uploaded once.
        assert summary["bytes"]["by_phase"]["head"]["payload_bytes"] == 8 * 88 * 3 * 2
        assert (
            largest_deviation(parameters(federation), reference_fedonce.train(tables, tables_of))
            <= TOLERANCE
        )


@pytest.mark.usefixtures("float64")
def test_a_party_killed_before_its_acknowledgement_needs_nobody_who_has_left(
    tmp_path: Path,
) -> None:
    """The active party has all uploads in a checkpoint, p1 has left, and p2 is one checkpoint
    behind.
    """
    tables, tables_of = once(3), data(3, "binary")
    tables["phases"][0]["epochs"] = 120
    with Proxy() as proxy, Federation(tmp_path, tables, tables_of) as federation:
        federation.extra = {"p2": {"active": proxy.address}}
        server = federation.start_server()
        proxy.target = federation.start_party(cases.ACTIVE).wait_for("ready")["address"]
        federation.start_party("p1")
        # It learns alone: rows have been compared.
        federation.start_party("p2").wait_for("progress")
        proxy.hold_replies()
        server.wait_for("left", party="p1")
        federation.programs["p2"].kill()
        server.wait_for("interrupted")
        proxy.release()
        federation.start_party("p2")
        assert federation.finish()["interruptions"] == 1
        started = [event["checkpoint"] for event in server_events(federation, "started")]
        assert started == ["", "000121.head.1"]
        # Once.
        assert uploaded(federation, "p0", "p2") == 8 * 88 * 3
        want = reference_fedonce.train(tables, tables_of)
        assert largest_deviation(parameters(federation), want) <= TOLERANCE


def test_a_late_party_counts_as_zeros_and_ends_well(tmp_path: Path) -> None:
    """Half of its upload has come when the deadline passes; what it sends again is answered, and
    not used.
    """
    tables, tables_of = wide(), cases.columns("sklearn:breast_cancer", 3, limit=200)
    # The deadline's clock starts when p0 has learnt as long as p1 has.
    tables["phases"][0]["active"] = True
    tables["phases"][1]["deadline_s"] = 3.0
    with held(tmp_path, tables, tables_of, sent=HANDSHAKE_BYTES + UPLOAD_BYTES // 2) as (
        federation,
        proxy,
    ):
        note = federation.programs["server"].wait_for("note")
        assert (note["party"], "p2" in note["note"]) == ("p0", True)
        assert_names(note["note"], "p2", "3.0")
        proxy.release()
        summary = federation.finish()
        notes = [event for event in server_events(federation, "note") if event["party"] == "p2"]
        assert_names(notes[0]["note"], "deadline_s")
        assert summary["interruptions"] == 0
        assert summary["without"] == ["p2"]
        got = parameters(federation)
        top = got["p0"]["top.0.weight"]
        assert not top[:, 2 * WIDE :].any()
        assert top[:, : 2 * WIDE].any()


@pytest.mark.usefixtures("float64")
def test_with_a_late_party_the_model_is_that_of_zeros(tmp_path: Path) -> None:
    """No frame of p2's upload is whole when the deadline passes: it was late as a whole."""
    tables, tables_of = once(3, deadline_s=3.0), data(3, "binary")
    tables["model"]["embedding_size"] = 64
    upload_bytes = 8 * 64 * 88
    with held(tmp_path, tables, tables_of, sent=HANDSHAKE_BYTES + upload_bytes // 2) as (
        federation,
        proxy,
    ):
        federation.programs["server"].wait_for("note", party="p0")
        proxy.release()
        summary = federation.finish()
        assert summary["without"] == ["p2"]
        # Once.
        assert uploaded(federation, "p2", "p0") == upload_bytes
        want = reference_fedonce.train(tables, tables_of, late=("p2",))
        assert largest_deviation(parameters(federation), want) <= TOLERANCE


def test_a_deadline_needs_concatenation() -> None:
    tables = once(3, deadline_s=2.0)
    tables["model"]["combine"] = "sum"
    refused_here(tables, "p0", data(3, "binary")["p0"], "deadline_s", "model.combine")


def test_the_kernel_counts_little_more_than_the_upload(tmp_path: Path) -> None:
    summary, federation = run(
        tmp_path, wide(), cases.columns("sklearn:breast_cancer", 3, limit=200)
    )
    messages = sum(
        entry.message_bytes
        for entry in federation.ledger("p2")
        if (entry.peer, entry.direction) == ("p0", "sent")
    )
    (tcp,) = [
        each for each in summary["bytes"]["tcp"] if (each["party"], each["peer"]) == ("p2", "p0")
    ]
    assert uploaded(federation, "p2", "p0") == UPLOAD_BYTES
    assert messages < tcp["sent_bytes"] < 1.03 * messages + HANDSHAKE_BYTES


def test_a_party_killed_while_it_learns_ends_with_the_same_parameters(tmp_path: Path) -> None:
    tables, tables_of = recipe(2, "binary", epochs=8), data(2, "binary")
    _, whole = run_here(tmp_path / "whole", tables, tables_of)
    with Killed(tmp_path / "killed", tables, tables_of) as federation:
        federation.plugin = plugged(tmp_path / "site")
        killed(federation, "p1", "checkpoint-named")
        federation.start_one("p1")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), parameters(whole))
