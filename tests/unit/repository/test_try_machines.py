"""scripts/try-machines runs tests under several settings, and says which settings have no effect."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.preloaded import threads

ROOT = Path(__file__).parents[3]
OLD = ("COMPATIBLE", "SSE41", "default", "2")
SAME = ("AVX2", "AVX2", "avx2", "1")


@pytest.fixture
def script() -> Any:
    loader = SourceFileLoader("try_machines", str(ROOT / "scripts" / "try-machines"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def measured(_python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Stands for a processor on which two values have an effect."""
    return {
        "products": variables.get("MKL_CBWR", ""),
        "sums": variables.get("ATEN_CPU_CAPABILITY", "").replace("avx2", ""),
    }


def test_the_tests_exist_and_the_quick_settings_cover_every_value(script: Any) -> None:
    assert [path for path in script.EXACTNESS if not (ROOT / path).exists()] == []
    for position, values in enumerate(script.VALUES.values()):
        assert {setting[position] for setting in script.QUICK if setting} == set(values)


def test_a_setting_is_nothing_but_its_variables(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    here = script.environment(script.HERE)
    assert here["OMP_NUM_THREADS"] == "1"
    assert "MKL_CBWR" not in here
    old = script.environment(OLD)
    assert {name: value for name, value in old.items() if here.get(name) != value} == {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "VFL_TESTS_THREADS": "2",
        **script.IDLE,
    }


def test_the_table_names_what_fails_in_a_setting(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last setting has the digests of this machine, and is not run."""
    (tmp_path / "test_toy.py").write_text(
        "import os\n"
        "def test_1(): assert os.environ.get('MKL_CBWR') != 'COMPATIBLE'\n"
        "def test_2(): assert os.environ['OMP_NUM_THREADS'] in '12'\n"
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setattr(script, "PARALLEL", ("-p", "xdist", "--numprocesses", "0"))
    monkeypatch.setattr(script, "QUICK", (script.HERE, OLD, SAME))
    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--distinct", str(tmp_path)])
    assert script.main() == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "MKL AVX2 no effect on this processor" in lines
    assert "MKL COMPATIBLE products" in lines
    assert "ATen default sums" in lines
    here, old = lines[-2:]
    assert here == "1 this machine 2 0"
    assert old.startswith("2 COMPATIBLE SSE41 default 2 1 1")
    assert old.endswith("test_toy.py::test_1")


def test_parties_that_ask_for_one_thread_get_as_many_as_the_setting_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    monkeypatch.setattr(threads, "NUMBER", 2)
    threads.several_threads()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
    assert torch.get_num_threads() == 3
    monkeypatch.undo()
    torch.set_num_threads(before)
    assert torch.get_num_threads() == before
