"""Deterministic initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator starts from ``seed`` (63 bits); afterwards it is as it was. CUDA's are untouched.

    Build modules inside and move them to a device afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the CUDA generators too
        yield
