"""Who may begin a new run while another one has not ended, who may open it, and what happens to the
old one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases, kills
from tests.harness.errors import assert_names, error_line, raises
from tests.harness.federation import Federation
from tests.harness.hostile import HostilePassive
from tests.integration.test_resume import (
    AFTER_FIRST,
    DATA,
    ROWS,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    held,
    parameters,
    recipe,
    undisturbed,
)
from vfl.summary.reading import find_runs
from vfl_common.errors import Code, PeerError

# A fixture.
__all__ = ["undisturbed"]
# A customer more, at every party.
CHANGED = cases.columns("sklearn:breast_cancer", 3, limit=ROWS + 1)


def interrupted(folder: Path, tables: dict[str, Any]) -> Federation:
    """A federation whose processes were all killed in the second epoch."""
    with held(folder, tables, sent=SECOND_EPOCH) as (federation, _):
        federation.wait_for_checkpoint(AFTER_FIRST)
        for program in federation.programs.values():
            program.kill()
    federation.programs.clear()
    federation.extra = {}
    return federation


def again(federation: Federation, *options: str) -> dict[str, int]:
    """Starts all with the same commands, the server with more ``options``; returns {name: exit
    code}.
    """
    federation.server_options = options
    federation.start_all()
    return {name: program.wait() for name, program in federation.programs.items()}


def notes(federation: Federation, run: Path, key: str) -> dict[str, Any]:
    """{name: what its folder of a run says}."""
    names = ("server", *federation.names)
    return {name: json.loads((run / name / "run.json").read_text()).get(key) for name in names}


def test_a_failed_night_blocks_the_next_until_the_server_alone_begins_anew(tmp_path: Path) -> None:
    with interrupted(tmp_path, recipe()) as federation:
        old = federation.run_folder
        federation.data = CHANGED
        codes = again(federation)
        assert codes["server"] == 2
        assert all(code in (2, 4) for code in codes.values())
        said = error_line(federation.programs["server"].stderr)
        assert old.name in said
        assert "vfl-server run --fresh" in said
        # Nobody has given it up.
        assert notes(federation, old, "set_aside") == dict.fromkeys(codes)
        assert set(again(federation, "--fresh").values()) == {0}
        (new,) = [run for run in (tmp_path / "runs").glob("[!.]*") if run.is_dir() and run != old]
        whys = {name: aside["why"] for name, aside in notes(federation, old, "set_aside").items()}
        (why,) = {*whys.values()}
        assert "--fresh" in why
        assert_names(why, "--fresh")
        assert set(notes(federation, new, "finished").values()) == {True}
        for name in federation.names:
            told = [
                event for event in federation.programs[name].seen() if event["event"] == "set_aside"
            ]
            assert [(event["run"], event["why"]) for event in told] == [(old.name, whys[name])]
            assert new.name in (old / name / "log.jsonl").read_text()
        assert {run.folder: run.state for run in find_runs(tmp_path / "runs")[0]} == {
            old: "set aside",
            new: "finished",
        }
        # A third run: the first is in nobody's way.
        assert set(again(federation).values()) == {0}
        assert len(find_runs(tmp_path / "runs")[0]) == 3


@pytest.mark.parametrize("align", ["digest", "psi"])
def test_an_old_run_is_set_aside_if_rows_have_changed(align: str, tmp_path: Path) -> None:
    tables = recipe(resume_within_s=0.0)
    tables["rows"]["align"] = align
    with interrupted(tmp_path, tables) as federation:
        old = federation.run_folder
        federation.data = CHANGED
        assert set(again(federation).values()) == {0}
        (why,) = {
            aside["why"].partition(" ")[2] for aside in notes(federation, old, "set_aside").values()
        }
        assert old.name in why
        assert_names(why, "columns")
        (new,) = [run for run in (tmp_path / "runs").glob("[!.]*") if run.is_dir() and run != old]
        assert set(notes(federation, new, "finished").values()) == {True}
        assert notes(federation, new, "generation")["server"] == 1


def test_an_old_run_whose_rows_are_the_same_is_resumed(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with interrupted(tmp_path, recipe(resume_within_s=0.0)) as federation:
        assert set(again(federation).values()) == {0}
        # Of the one run.
        assert_equal(parameters(federation), undisturbed)


def test_a_server_without_its_folder_begins_nothing_and_loses_nothing(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    """Parties that are in the run tell it that it lacks one; with the folder, all goes on."""
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        run = federation.run_folder
        federation.programs["server"].kill()
        shutil.move(run / "server", tmp_path / "aside")
        proxy.release()
        refused = federation.start_server(federation.address)
        assert refused.wait() == 2
        # Whichever came first is named.
        said = error_line(refused.stderr)
        assert run.name in said
        for name in federation.names:
            # Who came too late to hear of it looks for the server.
            federation.programs.pop(name).close()
        shutil.move(tmp_path / "aside", run / "server")
        for path in (tmp_path / "runs").glob("[!.]*"):
            if path != run:
                shutil.rmtree(path)
        federation.extra = {}
        assert set(again(federation).values()) == {0}
        assert_equal(parameters(federation), undisturbed)


def test_parties_that_are_in_a_run_follow_a_server_that_was_told_to_begin_anew(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        old = federation.run_folder
        federation.programs["server"].kill()
        proxy.release()
        federation.server_options = ("--fresh",)
        federation.start_server(federation.address)
        for name, program in federation.programs.items():
            assert program.wait() == 0, f"{name}: {program.stderr}"
            assert [event["run"] for event in program.seen() if event["event"] == "set_aside"] == [
                old.name
            ]
        shutil.rmtree(old)
        assert_equal(parameters(federation), undisturbed)


def noted(run: Path) -> dict[str, Any]:
    """Returns what the server notes of a run, without the time that it notes again as it goes."""
    facts: dict[str, Any] = json.loads((run / "server" / "run.json").read_text())
    del facts["trained_s"]
    return facts


def test_a_run_is_open_in_one_process_alone(tmp_path: Path, undisturbed: Parameters) -> None:
    """A second server at another port, and a party that is started twice, leave the run as it
    is.
    """
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        run = federation.run_folder
        before = noted(run)
        seconds = {
            "server": ("vfl-server", "run", "recipe.toml", "--listen", "127.0.0.1:0"),
            "p0": ("vfl-party", "run", "p0.toml"),
            "p2": ("vfl-party", "run", "p2.toml"),
        }
        for name, words in seconds.items():
            second = federation.start(f"second-{name}", *words)
            assert second.wait() == 2
            assert f"runs/{run.name}/{name}: " in error_line(second.stderr)
            federation.programs.pop(second.name).close()
        assert noted(run) == before
        proxy.release()
        assert federation.finish()["interruptions"] == 0
        assert_equal(parameters(federation), undisturbed)


def test_a_party_that_is_unfit_for_each_run_does_not_have_all_begin_for_ever(
    tmp_path: Path,
) -> None:
    with Federation(tmp_path, recipe(), DATA) as federation:
        server = federation.start_server()
        federation.start_party("p0")
        federation.start_party("p1")
        with HostilePassive(federation, "p2") as hostile:
            first = hostile.join_with()
            second = hostile.join_with(run_id=first.run_id, checkpoints=(), unfit="no reason")
            assert second.anew.startswith("p2 ")
            assert first.run_id in second.anew
            assert second.anew.endswith(": no reason")
            with raises(PeerError, Code.DATA_INVALID):
                hostile.join_with(run_id=second.run_id, checkpoints=(), unfit="no reason")
        assert server.wait() == 2
        line = error_line(server.stderr)
        assert f"{second.run_id}: no reason" in line
        assert {path.name for path in (tmp_path / "runs").glob("[!.]*") if path.is_dir()} == {
            first.run_id,
            second.run_id,
        }


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return kills.plugged(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("who", ["p0 p1 p2", "p2"])
@pytest.mark.parametrize(
    "late_policy", [{}, {"late_policy": "cached", "deadline_s": 5.0}], ids=["wait", "cached"]
)
def test_a_lying_server_does_not_keep_the_rows_from_being_compared(
    who: str, late_policy: dict[str, Any], tmp_path: Path, plugin: dict[str, str]
) -> None:
    """It says at the beginning of a run that the others are in the middle of it; p2 holds entirely
    other ids.
    """
    tables = recipe()
    tables["phases"][0] |= late_policy
    (tmp_path / "lie-returning").write_text(who)
    other = {"p2": DATA["p2"] | {"limit": 100}}
    with kills.Killed(tmp_path, tables, DATA | other) as federation:
        federation.plugin = plugin
        for name in ("server", *federation.names):
            federation.start_one(name)
        codes = {name: program.wait() for name, program in federation.programs.items()}
        assert 0 not in codes.values()
        assert codes["p2"] == 2
        assert "p2" in error_line(federation.programs["p2"].stderr)
