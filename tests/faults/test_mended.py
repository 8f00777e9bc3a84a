"""Faults that were found by attacking the system: each stays mended."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names, error_line, raises
from tests.harness.federation import Federation, refused
from tests.harness.hostile import HostilePassive, first_answer
from tests.harness.memory import refused_here
from vfl_common.bundle import PROTOCOL
from vfl_common.config.base import read_toml
from vfl_common.errors import AbortedError, Code, InputError, VflError
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2, failure_pb2
from vfl_common.rpc.channel import split_address
from vfl_common.rpc.exchange.service import MAX_STREAMS, SERVICE
from vfl_common.rpc.messages import from_failure
from vfl_common.text import clean


def trained(folder: Path) -> Federation:
    """A federation of two whose run has ended."""
    federation = Federation(folder, recipe(2), digits(2))
    with federation:
        federation.start_all()
        federation.finish()
    return federation


def test_a_prediction_survives_a_killed_party(tmp_path: Path) -> None:
    federation = trained(tmp_path / "f")
    run = federation.run_folder.name
    federation.programs.clear()
    federation.server_options = ("--predict",)
    with federation:
        server = federation.start_server()
        options = ("--run", f"runs/{run}")
        path = {name: federation.write_party(name).name for name in federation.names}
        passive = federation.start("p1", "vfl-party", "predict", path["p1"], *options)
        server.wait_for("joined", party="p1")
        passive.kill()
        server.wait_for("lost", party="p1")
        federation.start("p1", "vfl-party", "predict", path["p1"], *options)
        federation.start("p0", "vfl-party", "predict", path["p0"], *options)
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"
        told = federation.programs["p0"].wait_for("predicted", output="predictions.csv")
        assert (told["written"], told["rows"]) == (100, 100)
        assert_names(told["said"], "100")
        assert_names(federation.programs["p0"].wait_for("scores")["said"], "probability")
        assert "output" not in federation.programs["p1"].wait_for("predicted", written=100)
    lines = (federation.folder / "predictions.csv").read_text().splitlines()
    assert len(lines) == 101
    assert lines[0].startswith('"id","matched_id","state","score_0"')


def test_a_finished_run_is_never_overwritten(tmp_path: Path) -> None:
    federation = trained(tmp_path / "f")
    run = federation.run_folder
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    federation.programs.clear()
    with federation:
        again = federation.start("server", "vfl-server", "run", "recipe.toml", "--run-id", run.name)
        refused(again, run.name)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_report_that_cannot_be_read_names_its_sender(tmp_path: Path) -> None:
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        active = federation.start_party("p0")
        with HostilePassive(federation, "p1") as hostile:
            hostile.join_and_open()
            report = control_pb2.Report(metrics_json="][")
            hostile.send(control_pb2.PartyMessage(report=report))
            assert server.wait(30) == 2
            assert "p1" in error_line(server.stderr)
            refused(active, "p1", code=4)


def test_idle_streams_of_one_party_do_not_hold_up_the_others(tmp_path: Path) -> None:
    """p1 opens stream after stream and attaches none: at most three are held, and p2 gets
    through.
    """
    with Federation(tmp_path / "f", recipe(3), {**digits(4)}) as federation:
        federation.start_server()
        active = federation.start_party("p0")
        address = active.wait_for("ready", 30)["address"]
        federation.start_party("p2")
        with HostilePassive(federation, "p1") as hostile:
            with hostile.dial(address, "p0") as channel:
                method = channel.stream_stream(f"/{SERVICE}/Swap")
                calls = [method(iter(_Silent())) for _ in range(MAX_STREAMS + 3)]
                answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
                for call in calls:
                    threading.Thread(target=first_answer, args=[call, answers], daemon=True).start()
                # Whichever came last.
                for _ in range(3):
                    frame = exchange_pb2.Frame.FromString(answers.get(timeout=10))
                    assert frame.failure.code == int(Code.NAME_TAKEN)
                assert answers.empty()
                for call in calls:
                    call.cancel()
            hostile.join_and_open()
            assert "p1" in str(
                hostile.swap_expecting_failure(hostile.bundle(np.zeros((2, 2), np.float32)))
            )


class _Silent:
    """Requests that never come, until the stream is cancelled: gRPC's sending thread is a
    daemon.
    """

    def __iter__(self) -> _Silent:
        return self

    def __next__(self) -> bytes:
        threading.Event().wait(20.0)
        raise StopIteration


def test_an_unknown_generation_does_not_keep_the_active_party(tmp_path: Path) -> None:
    """A stream that waits for a generation that never comes is let go when the party ends."""
    with Federation(
        tmp_path / "f", recipe(2, run={"rejoin_deadline_s": 60.0}), digits(2)
    ) as federation:
        federation.start_server()
        active = federation.start_party("p0")
        address = active.wait_for("ready", 30)["address"]
        with HostilePassive(federation, "p1") as hostile, hostile.dial(address, "p0") as channel:
            attach = exchange_pb2.Attach(run_id="x", generation=99, protocol=PROTOCOL)
            call = channel.stream_stream(f"/{SERVICE}/Swap")(
                iter([exchange_pb2.Frame(attach=attach).SerializeToString()])
            )
            hostile.join_and_open()
            hostile.swap_expecting_failure(hostile.bundle(np.zeros((2, 2), np.float32)))
            assert active.wait(15) == 2
            call.cancel()


@pytest.mark.parametrize(
    "address", ["foo", "", "localhost:99999", "127.0.0.1:abc", ":", "a:-1", "[::1]:"]
)
def test_what_is_no_address(address: str) -> None:
    with raises(InputError, Code.ADDRESS_INVALID, names="65535"):
        split_address(address)


def test_an_address_has_a_host_and_a_port() -> None:
    assert split_address("[::1]:7000") == ("::1", 7000)


def test_a_failure_cannot_write_lines_of_its_own() -> None:
    assert clean("fine\nerror: forged\x1b[31m") == "fine error: forged [31m"
    failure = failure_pb2.Failure(
        code=failure_pb2.ABORTED, message="x" * 10_000, party="p9\nerror: y"
    )
    error = from_failure(failure, sender="server", me="p1")
    assert isinstance(error, AbortedError)
    assert "\n" not in str(error)
    assert len(str(error)) < 700


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000 + "]" * 5000, "a = " + "9" * 5000, "a = ["],
    ids=["deep", "long integer", "cut"],
)
def test_toml_that_python_chokes_on(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with raises(VflError, Code.CONFIG_INVALID, names="x.toml"):
        read_toml(path)


def test_early_stopping_by_a_metric_that_the_task_lacks() -> None:
    phase = {"kind": "splitnn", "epochs": 2, "early_stopping": {"metric": "rmse"}}
    refused_here(recipe(2) | {"phases": [phase]}, "p0", digits(2)["p0"], "multiclass", "rmse")


def test_batch_normalisation_needs_two_rows() -> None:
    made = recipe(
        2, model={"encoder": {"kind": "mlp", "batch_norm": True}}, phase={"batch_size": 1}
    )
    refused_here(made, "p1", digits(2)["p1"])


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    """The ids are the same; a column has changed since the checkpoint."""
    rows = np.random.default_rng(3).normal(size=(60, 4)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int64)
    folder = tmp_path / "f"
    folder.mkdir()
    np.savez(folder / "a.npz", x=rows[:, :2], y=labels)
    np.savez(folder / "b.npz", x=rows[:, 2:])
    made = recipe(
        2, task={"kind": "binary"}, phase={"epochs": 400}, run={"rejoin_deadline_s": 20.0}
    )
    data = {"p0": {"source": "a.npz", "label": "y"}, "p1": {"source": "b.npz"}}
    with Federation(folder, made, data) as federation:
        server = federation.start_server()
        for name in federation.names:
            federation.start_party(name)
        # All hold the first checkpoint when a third round is told. A slow round is told twice.
        while server.wait_for("progress")["round"] < 3:
            pass
        federation.programs["p1"].kill()
        np.savez(folder / "b.npz", x=rows[:, 2:] + 1.0)
        refused(federation.start_party("p1"))
        facts = json.loads((federation.run_folder / "p1" / "run.json").read_text())
        assert not facts.get("finished")
