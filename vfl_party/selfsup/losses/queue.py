"""Implements MoCo's queue of negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vfl_party.models import generator


class KeyQueue:
    """A ring buffer of the last ``size`` keys, unit rows of ``width``. The keys are random at
    first, as in MoCo's own code.

    The first keys are drawn on the CPU from ``seed``, so that they are the same on every device.
    """

    def __init__(
        self, size: int, width: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        rows_QD = torch.randn(size, width, generator=generator(seed))
        self._keys_QD = functional.normalize(rows_QD, dim=1).to(device)
        # The index of the oldest key, which is overwritten next.
        self._next = 0

    @property
    def keys(self) -> Tensor:
        """The keys, [Q, D], without gradient. The tensor is never changed in place, because a
        backward pass may still follow a push.
        """
        return self._keys_QD

    @torch.no_grad()
    def push(self, k_BD: Tensor) -> None:
        """Overwrites the B oldest keys with the normalised rows of k_BD. If B > Q, only the last Q
        rows are used.
        """
        size = len(self._keys_QD)
        places_B = (
            torch.arange(self._next, self._next + len(k_BD), device=self._keys_QD.device) % size
        )
        rows_BD = functional.normalize(k_BD[-size:], dim=1).to(self._keys_QD)
        self._keys_QD = self._keys_QD.index_copy(0, places_B[-size:], rows_BD)
        self._next = (self._next + len(k_BD)) % size

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint. Later pushes do not change it."""
        return {"keys": self._keys_QD, "next": self._next}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the ``state`` of a queue of the same size, from any device."""
        self._keys_QD = state["keys"].to(self._keys_QD)
        self._next = state["next"]
