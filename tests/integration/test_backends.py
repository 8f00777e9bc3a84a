"""Runs of a study through backends of joblib: loky's processes, and the workers of Dask, of Ray and
of Spark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

import vfl
from tests.harness.errors import assert_names, raises
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA, SLOW
from vfl.library.simulate import run_files
from vfl_common.errors import Code
from vfl_lab.studies.run import run_study

pytest.importorskip("joblib")

# Two runs; the process of the second is killed the first time, and the third is not begun.
DIES_ONCE = """
import os, pathlib, signal
import torch

def once(spec, width):
    died = pathlib.Path(__file__).with_name("died")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Linear(spec.shape[0], width)

def plain(spec, width):
    return torch.nn.Linear(spec.shape[0], width)
"""


def same(ours: vfl.Study, theirs: vfl.Study) -> None:
    assert ours.columns() == theirs.columns()
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.curves() == other.curves()
        assert one.bytes == other.bytes
        assert pd.DataFrame(one.predictions).equals(pd.DataFrame(other.predictions))


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process, and those that it starts, import what is in a folder."""
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(scope="module")
def here() -> vfl.Study:
    return vfl.study(RECIPE, {"seed": [1, 2]}, DATA, quiet=True)


def test_loky_gives_the_same_numbers_with_files_and_with_frames(
    here: vfl.Study, tmp_path: Path
) -> None:
    there = vfl.study(
        RECIPE, {"seed": [1, 2]}, DATA, quiet=True, jobs=2, backend="loky", out=tmp_path
    )
    same(there, here)
    # One at a time is not this process either.
    before = set(tmp_path.iterdir())
    again = vfl.study(RECIPE, {"seed": [1]}, DATA, quiet=True, backend="loky", out=tmp_path)
    assert set(tmp_path.iterdir()) == before
    assert again.runs[0].folder == there.runs[0].folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_two_workers_of_dask_give_the_same_numbers_and_a_killed_one_loses_nothing(
    here: vfl.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    (tmp_path / "own.py").write_text(DIES_ONCE)
    importable(tmp_path, monkeypatch)
    over: dict[str, list[Any]] = {
        "parties.shop.encoder": [{"kind": "custom", "factory": "own:once"}],
        "seed": [1, 2],
    }
    call: dict[str, Any] = {"quiet": True, "jobs": 2, "backend": "dask"}
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as workers:
        with distributed.Client(workers):
            same(vfl.study(RECIPE, {"seed": [1, 2]}, DATA, **call), here)
        # As DASK_SCHEDULER_ADDRESS sets it. Dask begins the run of a lost worker again, in the
        # folder that it had.
        with dask.config.set({"scheduler-address": workers.scheduler_address}):
            there = vfl.study(RECIPE, over, DATA, out=tmp_path / "runs", **call)
    assert (tmp_path / "died").exists()
    over["parties.shop.encoder"] = [{"kind": "custom", "factory": "own:plain"}]
    undisturbed = vfl.study(RECIPE, over, DATA, quiet=True)
    assert there.columns()["test auc"] == undisturbed.columns()["test auc"]
    for (_, one), (_, other) in zip(there, undisturbed, strict=True):
        assert one.curves() == other.curves()


OTHER = """
import sys
import vfl
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA

there = vfl.study(RECIPE, {"seed": [1, 2]}, DATA, jobs=2, backend=sys.argv[1], out=sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "package"), [("ray", "ray"), ("spark", "joblibspark")])
def test_ray_and_spark_give_the_same_numbers_where_they_are_installed(
    here: vfl.Study, tmp_path: Path, backend: str, package: str
) -> None:
    pytest.importorskip(package)
    command = [sys.executable, "-c", OTHER, backend, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    # Finished there, so only read here.
    same(vfl.study(RECIPE, {"seed": [1, 2]}, DATA, quiet=True, out=tmp_path), here)
    assert len(list(tmp_path.glob("*/summary.json"))) == 2


def test_a_backend_is_sent_nothing_but_texts_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    import joblib

    sent: list[Any] = []
    delayed = joblib.delayed

    def noting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            sent.append([function.__module__, function.__qualname__, *args])
            return delayed(function)(*args)

        return call

    monkeypatch.setattr(joblib, "delayed", noting)
    vfl.study(RECIPE, {"seed": [1]}, DATA, quiet=True, backend="loky")
    ((module, function, does, order),) = sent
    assert (module, function, does) == ("vfl.jobs", "answer", "vfl.library.simulate:make")
    assert json.loads(json.dumps(order)) == order


def test_a_killed_process_of_loky_ends_the_study_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(DIES_ONCE)
    importable(tmp_path, monkeypatch)
    over = {
        "parties.shop.encoder": [
            {"kind": "custom", "factory": f"own:{name}"} for name in ("plain", "once")
        ]
    }
    call: dict[str, Any] = {"quiet": True, "backend": "loky", "out": tmp_path / "runs"}
    with raises(vfl.VflError, Code.PARTY_LOST, names="loky"):
        vfl.study(RECIPE, over, DATA, **call)
    kept = [each.parent for each in (tmp_path / "runs").glob("*/summary.json")]
    assert len(kept) == 1
    found = vfl.study(RECIPE, over, DATA, **call)
    assert found.runs[0].folder == kept[0]
    assert found.runs[0].curves() == found.runs[1].curves()


def test_an_error_ends_the_runs_of_loky_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    importable(tmp_path, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = {
        "parties.shop.encoder": [
            {"kind": "custom", "factory": f"slow:{name}"} for name in ("wait", "missing")
        ]
    }
    with raises(
        vfl.VflError, Code.MODEL_INVALID, names=("slow:missing", "model.encoder.factory")
    ) as failed:
        vfl.study(RECIPE, over, DATA, jobs=2, quiet=True, backend="loky")
    assert_names("\n".join(failed.value.__notes__), "kind", "custom")
    assert not (tmp_path / "woken").exists()


DRIVER = """
import sys
import vfl
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA

vfl.study(RECIPE, {"seed": [1, 2, 3]}, DATA, backend="loky", out=sys.argv[1])
"""
# Says which process makes the run, which never ends by itself.
LINGERS = """
import os, sys, time

def waits(spec, width):
    print("run by", os.getpid(), file=sys.stderr, flush=True)
    time.sleep(3600)
"""
WAITS = """
import vfl
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA

own = {"parties.shop.encoder": {"kind": "custom", "factory": "own:waits"}}
vfl.study(RECIPE.replace(own), {"seed": [1]}, DATA, backend="loky", quiet=True)
"""


def test_the_processes_of_loky_end_with_a_killed_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(LINGERS)
    importable(tmp_path, monkeypatch)
    driver = subprocess.Popen(
        [sys.executable, "-c", WAITS], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert driver.stderr is not None
    number = next(int(line.split()[-1]) for line in driver.stderr if line.startswith("run by"))
    made = psutil.Process(driver.pid).children(recursive=True)
    assert number in [each.pid for each in made]
    driver.send_signal(signal.SIGKILL)
    driver.wait(timeout=60)
    # Also one that has had no order.
    _, left = psutil.wait_procs(made, timeout=60)
    assert left == []
    driver.stderr.close()


def test_a_killed_driver_loses_no_finished_run(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert driver.stderr is not None
    for line in driver.stderr:
        if "run 2 of 3" in line:
            break
    driver.send_signal(signal.SIGKILL)
    driver.wait(timeout=60)
    driver.stderr.close()
    kept = {each.parent for each in tmp_path.glob("*/study.json")}
    assert kept
    found = vfl.study(RECIPE, {"seed": [1, 2, 3]}, DATA, quiet=True, out=tmp_path)
    assert kept <= {run.folder for run in found.runs}
    same(found, vfl.study(RECIPE, {"seed": [1, 2, 3]}, DATA, quiet=True))


STUDY = """
name = "two"
recipe = "recipe.toml"
seeds = [1, 2]
metric = "auc"
finetune = [{ kind = "splitnn", epochs = 1 }, { kind = "evaluate" }]
methods = [{ name = "SplitNN" }]
"""


def test_vfl_study_has_a_backend_make_its_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own-files" / "recipe.toml"
    recipe = vfl.Recipe.load(example)
    parties = {
        name: each | {"source": str(example.parent / each["source"])}
        for name, each in recipe.to_dict()["simulate"]["parties"].items()
    }
    recipe.replace({"simulate.parties": parties}).save(tmp_path / "recipe.toml")
    (tmp_path / "study.toml").write_text(STUDY)
    command = [sys.executable, "-m", "vfl", "study", str(tmp_path / "study.toml"), "--json"]
    command += ["--out", str(tmp_path / "a"), "--jobs", "2", "--backend", "loky"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.count('"done"') == 2
    # Also what a process says that joblib leaves behind.
    assert done.stderr == ""
    there = run_study(tmp_path / "study.toml", tmp_path / "a")
    here = run_study(tmp_path / "study.toml", tmp_path / "b", make=run_files)
    assert [each.metrics for each in there] == [each.metrics for each in here]


def test_what_joblib_cannot_use_is_said_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if they were not installed.
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    monkeypatch.setitem(sys.modules, "joblibspark", None)
    wrong: tuple[Any, ...] = ("none", "dask", "ray", "spark", 5, ["loky"])
    for backend in wrong:
        with raises(vfl.VflError, Code.CONFIG_INVALID):
            vfl.study(RECIPE, {"seed": [1]}, DATA, quiet=True, backend=backend)


NOTHING = """
import sys
import vfl
import vfl.jobs

# Later, scikit-learn, which metrics need, has joblib loaded.
assert "joblib" not in sys.modules
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA

vfl.study(RECIPE, {"seed": [1]}, DATA, quiet=True)
extras = {"dask", "distributed", "duckdb", "optuna", "pyspark", "ray"}
print(sorted(extras & set(sys.modules)))
"""


def test_what_no_setting_asks_for_is_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTHING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
