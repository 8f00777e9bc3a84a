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


def seed_all(seed: int, device: torch.device) -> None:
    """Starts torch's generators from ``seed`` (63 bits); for a ``device`` that is the CPU, only that of the CPU.

    torch notes for every kind of GPU that is not used yet where in the program its generator was seeded: 10 ms.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
