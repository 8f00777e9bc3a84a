"""A party that fails before it joins: the others read why they wait, and it may be started again."""

from __future__ import annotations

from pathlib import Path

from tests.faults.test_mended import trained
from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, reason_to_wait, refused


def test_the_others_read_at_once_why_a_party_does_not_join(tmp_path: Path) -> None:
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        active = federation.start_party("p0")
        active.wait_for("waiting")
        data = federation.data["p1"]
        federation.data["p1"] = {"source": "SECRET.csv", "id": "id"}
        refused(federation.start_party("p1"), "SECRET.csv")
        told = server.wait_for("refused", party="p1")
        assert_names(told["why"], "p1", "file")
        why = reason_to_wait(active, "p1")
        assert_names(why, "p1", "file")
        assert "SECRET" not in why + told["why"]
        # A device that is not there is found before the data are read.
        refused(federation.start_party("p1", "--device", "cuda:7"), "cuda:7")
        assert_names(server.wait_for("refused", party="p1")["why"])
        assert "device" in reason_to_wait(active, "p1")

        federation.data["p1"] = data
        federation.start_party("p1")
        federation.finish()


def test_a_prediction_s_parties_read_why_one_does_not_join(tmp_path: Path) -> None:
    federation = trained(tmp_path / "f")
    run = f"runs/{federation.run_folder.name}"
    federation.programs.clear()
    federation.server_options = ("--predict",)
    with federation:
        server = federation.start_server()
        path = {name: federation.write_party(name).name for name in federation.names}
        active = federation.start("p0", "vfl-party", "predict", path["p0"], "--run", run)
        active.wait_for("waiting")
        (tmp_path / "f" / "one.csv").write_text("id\n1\n")
        for options in (("--run", "runs/none"), ("--run", run, "--data", "one.csv")):
            refused(federation.start("p1", "vfl-party", "predict", path["p1"], *options))
            server.wait_for("refused", party="p1")
            assert_names(reason_to_wait(active, "p1"))
        federation.start("p1", "vfl-party", "predict", path["p1"], "--run", run)
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"


def test_a_server_that_gives_up_says_why_a_party_did_not_join(tmp_path: Path) -> None:
    settings = recipe(2, run={"join_deadline_s": 12.0})
    with Federation(tmp_path / "f", settings, digits(2)) as federation:
        server = federation.start_server()
        active = federation.start_party("p0")
        active.wait_for("waiting")
        federation.data["p1"] = {"source": "none.csv", "id": "id"}
        refused(federation.start_party("p1"), "none.csv")
        for program in (server, active):
            refused(program, "p1", code=3)
