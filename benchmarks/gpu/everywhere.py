"""A plug-in of pytest: parties that a test runs in its own process compute on the GPU.

    pytest -p benchmarks.gpu.everywhere tests/integration -k "not processes"

A comparison with a reference on the CPU may then fail by rounding; anything else that fails is a
fault.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from vfl_party.base import devices

_resolve = devices.resolve_device


def _on_gpu(text: str) -> torch.device:
    return _resolve("cuda" if text == "cpu" and torch.cuda.is_available() else text)


def pytest_configure(config: pytest.Config) -> None:
    """Replaces the function while pytest runs."""
    replaced = patch.object(devices, "resolve_device", _on_gpu)
    replaced.start()
    config.add_cleanup(replaced.stop)
