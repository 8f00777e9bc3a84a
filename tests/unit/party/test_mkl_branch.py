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
    found = subprocess.run(
        program, env=own, capture_output=True, text=True, check=True, timeout=120
    )
    return found.stdout.strip(), found.stderr


@pytest.mark.slow
def test_the_variable_is_set_before_the_first_product() -> None:
    assert said("import torch", "import vfl", PRODUCT, SHOWN) == ("AUTO,STRICT", "")


@pytest.mark.slow
def test_a_value_of_the_environment_takes_precedence() -> None:
    assert said(PRODUCT, "import vfl", SHOWN, MKL_CBWR="COMPATIBLE") == ("COMPATIBLE", "")


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch computes without MKL")
def test_a_product_before_the_import_gives_one_warning() -> None:
    out, err = said(PRODUCT, "import vfl", "import vfl_party.cli", SHOWN)
    assert out == "AUTO,STRICT"
    assert err.count("Warning") == 1
    assert "import vfl first, or set MKL_CBWR=AUTO,STRICT" in err
