"""What decides the last bits of a process's numbers, in checkpoints and summaries."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.harness.sharing import MACHINES, OLDER
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.summary import Arithmetic, ArithmeticChange
from vfl_party.base import arithmetic as module
from vfl_party.base.arithmetic import (
    MAX_CHANGES,
    compare_resumed,
    describe_arithmetic,
    list_differences,
)
from vfl_party.runtime.outcome import RunOutcome
from vfl_server.control.reports import get_report_facts, is_sound

CPU = torch.device("cpu")
PRINT = "import torch; from vfl_party.base.arithmetic import describe_arithmetic as a; print(a(torch.device('cpu')).model_dump_json())"


def elsewhere(variables: dict[str, str]) -> Arithmetic:
    """Returns the arithmetic of another process with these variables, and no other settings."""
    kept = {name: value for name, value in os.environ.items() if name not in module.SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return Arithmetic.model_validate_json(done.stdout)


def made(**of: Any) -> Arithmetic:
    facts: dict[str, Any] = {
        "device": "cpu",
        "processor": "A",
        "instructions": "AVX2",
        "threads": 1,
        "libraries": {"torch": "2.14.1", "MKL": "2024.2"},
        "settings": {"MKL_CBWR": "AUTO"},
        "digests": {"products": "01", "draws": "02"},
    }
    return Arithmetic(**facts | of)


@pytest.mark.slow
def test_another_process_of_this_machine_has_the_same() -> None:
    settings = {name: os.environ[name] for name in module.SETTINGS if name in os.environ}
    same = elsewhere(settings | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    assert same == describe_arithmetic(CPU)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT" or not torch.backends.mkl.is_available(),
    reason="there is one instruction set only",
)
def test_another_instruction_set_gives_other_bits() -> None:
    here = elsewhere({})
    found = list_differences(here, elsewhere(MACHINES[OLDER]))
    assert f"instructions: DEFAULT, was {here.instructions}" in found
    assert "other bits in products, convolutions, functions, draws" in found


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    before = describe_arithmetic(CPU)
    module._arithmetic.cache_clear()
    torch.manual_seed(3)
    # As bfloat16 on a CPU leaves it: a party that resumes has not run its model yet.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert describe_arithmetic(CPU) == before
    assert torch.backends.mkldnn.enabled is False
    assert torch.equal(torch.rand(4), want)


def test_the_default_type_of_numbers_changes_no_digest() -> None:
    before = describe_arithmetic(CPU)
    module._arithmetic.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert describe_arithmetic(CPU) == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_count() -> None:
    threads = torch.get_num_threads()
    before = describe_arithmetic(CPU)
    torch.set_num_threads(threads + 1)
    try:
        assert f"threads: {threads + 1}, was {threads}" in list_differences(
            before, describe_arithmetic(CPU)
        )
    finally:
        torch.set_num_threads(threads)
    assert describe_arithmetic(CPU) == before


def test_differences_are_named() -> None:
    other = made(
        processor="B",
        threads=2,
        libraries={"torch": "2.15.0", "oneDNN": "3"},
        settings={},
        digests={"products": "03", "draws": "02"},
    )
    assert list_differences(made(), made()) == []
    assert list_differences(made(), other) == [
        "processor: B, was A",
        "threads: 2, was 1",
        "torch: 2.15.0, was 2.14.1",
        "oneDNN: 3, was none",
        "MKL: none, was 2024.2",
        "MKL_CBWR: none, was AUTO",
        "other bits in products",
    ]


def test_changes_are_kept_up_to_a_bound() -> None:
    first, change = compare_resumed(made(), made(processor="B"), "000001.splitnn.1")
    assert change is not None
    assert first == made(processor="B", changes=[change])
    assert (change.checkpoint, change.differs) == ("000001.splitnn.1", ["processor: B, was A"])
    # On the same machine again nothing is new, and nothing is forgotten.
    assert compare_resumed(first, made(processor="B"), "000002.splitnn.2") == (first, None)
    many = made(changes=[change] * MAX_CHANGES)
    last, _ = compare_resumed(many, made(threads=2), "000003.splitnn.3")
    assert len(last.changes) == MAX_CHANGES
    assert last.changes[-1].differs == ["threads: 2, was 1"]


def test_a_checkpoint_keeps_it_and_an_older_one_loads() -> None:
    changed = made(
        changes=[ArithmeticChange(checkpoint="000001.a.1", differs=["threads: 2, was 1"])]
    )
    tree = RunOutcome(arithmetic=changed).tree()
    assert RunOutcome.restore(tree, "000002.a.2").arithmetic == changed
    del tree["arithmetic"]
    assert RunOutcome.restore(tree, "000002.a.2").arithmetic is None
    assert compare_resumed(None, made(), "000002.a.2") == (made(), None)


def test_the_server_takes_what_can_be_read() -> None:
    report = control_pb2.Report(arithmetic_json=made().model_dump_json())
    assert is_sound(report)
    assert get_report_facts(report)["arithmetic"] == made()
    # An older party.
    assert is_sound(control_pb2.Report())
    assert get_report_facts(control_pb2.Report())["arithmetic"] is None
    for text in ("{}", "[]", "[" * 1000, made().model_dump_json() + " " * (2 << 20)):
        assert not is_sound(control_pb2.Report(arithmetic_json=text))
