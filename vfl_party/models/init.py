"""Deterministic initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Starts torch's CPU generator from ``seed`` (63 bits) inside the block and restores it afterwards, not CUDA's.

    Build modules inside the block and move them to a device afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the CUDA generators too
        yield
