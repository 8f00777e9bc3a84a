"""MKL's variable, which is set before torch's first product, or a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

PRODUCT = "import torch; torch.ones(8, 8) @ torch.ones(8, 8)"
SHOWN = "import os; print(os.environ['MKL_CBWR'])"


def said(*lines: str, **environment: str) -> tuple[str, str]:
    """Returns what Python writes to standard output and to standard error."""
    own = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | environment
    program = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(program, env=own, capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.strip(), found.stderr


@pytest.mark.parametrize(
    ("lines", "environment", "value"),
    [
        (["import vfl", PRODUCT], {}, "AUTO,STRICT"),
        (["import torch", "import vfl_party"], {}, "AUTO,STRICT"),
        ([PRODUCT, "import vfl"], {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),
    ],
)
def test_the_variable_is_set_in_time_without_a_word(
    lines: list[str], environment: dict[str, str], value: str
) -> None:
    assert said(*lines, SHOWN, **environment) == (value, "")


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch computes without MKL")
@pytest.mark.parametrize("package", ["vfl", "vfl_party"])
def test_who_uses_torch_first_is_warned_once(package: str) -> None:
    out, err = said(PRODUCT, f"import {package}", "import vfl_party.cli", SHOWN)
    assert out == "AUTO,STRICT"
    assert err.count("Warning") == 1
    assert "import vfl first, or set MKL_CBWR=AUTO,STRICT" in err
