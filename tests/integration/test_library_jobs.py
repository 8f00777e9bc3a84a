"""Runs of a study in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import vfl
from tests.harness.errors import assert_names, raises
from tests.integration.test_library import BANK, RECIPE, SHOP
from vfl import jobs
from vfl.jobs import JobWorkers
from vfl.library.simulate import RUN_FUNCTION, carry_out, send
from vfl_common.errors import Code, InputError

DATA = {"bank": vfl.Data(BANK, label="target"), "shop": SHOP}
ENCODERS = """
import os, signal
import torch

def talks(spec, width):
    print("not an answer", flush=True)
    os.write(1, b"nor this\\n")
    return torch.nn.Linear(spec.shape[0], width)

class Fails(torch.nn.Linear):
    def __init__(self, spec, width):
        super().__init__(spec.shape[0], width)

    def forward(self, x):
        raise KeyError("of the user")  # here

def reads(spec, width):
    import sys
    assert (sys.stdin.readline(), os.read(0, 1)) == ("", b"")
    return talks(spec, width)

def dies(spec, width):
    os.kill(os.getpid(), signal.SIGKILL)
"""

SLOW = """
import pathlib, time

def wait(spec, width):
    time.sleep(120)
    pathlib.Path(__file__).with_name("woken").touch()
"""


def test_two_runs_at_a_time_give_the_same_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over: dict[str, list[Any]] = {"baseline": [None, "combined"]}
    one = vfl.study(RECIPE, over, DATA, seeds=[3], quiet=True)
    two = vfl.study(RECIPE, over, DATA, seeds=[3], out=tmp_path, jobs=2)
    said = capfd.readouterr().err
    assert "run 1 of 2: baseline = federation, seed = 3" in said
    assert "run 2 of 2: baseline = combined, seed = 3" in said
    assert two.columns() == one.columns()
    assert two.values == one.values
    for (_, ours), (_, theirs) in zip(two, one, strict=True):
        assert ours.curves() == theirs.curves()
        assert ours.bytes == theirs.bytes
        assert ours.folder.parent == tmp_path
    new = {"bank": BANK.drop(columns="target").head(9), "shop": SHOP.head(9)}
    assert two.runs[0].predict(new) == one.runs[0].predict(new)
    assert pd.DataFrame(two.runs[1].predictions).equals(pd.DataFrame(one.runs[1].predictions))


def test_a_process_makes_one_run_after_the_other_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(ENCODERS)
    # A Path counts for nothing.
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    # Not the recipe's own folder: a process imports as this one does.
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(encoder: str, workers: JobWorkers) -> vfl.Run:
        recipe = RECIPE.replace(
            {"parties.shop.encoder": {"kind": "custom", "factory": f"own:{encoder}"}}
        )
        return carry_out(recipe, DATA, partial(send, workers), baseline=None, out=None)

    with JobWorkers(RUN_FUNCTION, 1, 1) as workers:
        with raises(vfl.VflError, Code.MODEL_INVALID, names="shop") as failed:
            run("Fails", workers)
        assert failed.value.code is vfl.Code.MODEL_INVALID
        text = "".join(traceback.format_exception(failed.value))
        assert 'raise KeyError("of the user")  # here' in text
        with raises(
            vfl.VflError, Code.MODEL_INVALID, names=("own:missing", "model.encoder.factory")
        ):
            run("missing", workers)
        assert run("reads", workers).metrics["test"]
        with raises(vfl.VflError, Code.PARTY_LOST):
            run("dies", workers)
        with raises(vfl.VflError, Code.PARTY_LOST):
            run("talks", workers)


def test_a_process_ends_when_nobody_waits_for_it_any_more() -> None:
    command = [sys.executable, "-P", "-m", "vfl.jobs", RUN_FUNCTION]
    done = subprocess.run(
        command, input="[]\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_ends_all_runs_at_once_and_names_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run fails; the other, which would take two minutes, is ended, and nothing of both
    stays.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    over = {
        "parties.shop.encoder": [
            {"kind": "custom", "factory": f"slow:{name}"} for name in ("wait", "missing")
        ]
    }
    with raises(
        vfl.VflError, Code.MODEL_INVALID, names=("slow:missing", "model.encoder.factory")
    ) as failed:
        vfl.study(RECIPE, over, DATA, jobs=2, quiet=True)
    assert_names("\n".join(failed.value.__notes__), "kind", "custom")
    assert not list(tmp_path.glob("vfl-*"))
    assert not (tmp_path / "woken").exists()


def test_all_processes_end_if_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Once(jobs._Worker):
        def __init__(self, does: str, threads: int) -> None:
            if started:
                raise OSError(24, "Too many open files")
            super().__init__(does, threads)
            started.append(self._process)

    monkeypatch.setattr(jobs, "_Worker", Once)
    with raises(vfl.VflError, Code.INTERNAL, names="24"):
        vfl.study(RECIPE, {"seed": [1, 2]}, DATA, jobs=2, quiet=True)
    assert [each.returncode for each in started] == [-9]


def test_what_cannot_be_done_is_said_before_the_first_run() -> None:
    wrong: list[Any] = [[], "12", 3]
    for seeds in wrong:
        with raises(InputError, Code.CONFIG_INVALID):
            vfl.study(RECIPE, {"seed": [1, 2]}, DATA, seeds=seeds)
    for number in (0, -1, 1.5, True, "2"):
        with raises(InputError, Code.CONFIG_INVALID):
            vfl.study(RECIPE, {"seed": [1, 2]}, DATA, jobs=number)  # type: ignore[arg-type]

    def cell(spec: Any, width: int) -> Any: ...

    recipe = RECIPE.replace({"model.encoder": cell})
    with raises(InputError, Code.MODEL_INVALID):
        vfl.study(recipe, {"seed": [1, 2]}, DATA, jobs=2, quiet=True)
