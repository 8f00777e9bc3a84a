"""Parties of one process that take turns: what one sets in torch is not set for another."""

from __future__ import annotations

import threading
from typing import Any

import torch

from vfl_party.base.turns import TakingTurns, isolate_torch

MKLDNN: Any = torch.backends.mkldnn


class Both:
    """Two parties that give their turns up to each other, step by step."""

    def __init__(self, turns: TakingTurns) -> None:
        self._turns, self._condition, self.said = turns, threading.Condition(), 0

    def give_up(self) -> None:
        """Waits until the other one has called this, or ``end``, once more."""
        self.said += 1
        mine = self.said
        self._turns.wait_for(self._condition, lambda: self.said > mine, 1.0)

    def end(self) -> None:
        self.said += 1


def test_a_turn_that_is_given_up_in_the_middle_of_an_autocast_leaves_it_at_its_party() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    x, found = torch.eye(2), dict[str, list[torch.Tensor]](one=[], two=[])

    def casts() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            found["one"].append(x @ weight)
            both.give_up()
            found["one"].append(x @ weight)
        found["one"].append(x @ weight)
        both.end()

    def plain() -> None:
        found["two"].append(x @ weight)
        # As an optimizer would between two passes.
        for factor in (2.0, 3.0):
            with torch.no_grad():
                weight.mul_(factor)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found["two"].append(x @ weight)
        torch.set_default_dtype(torch.float64)
        MKLDNN.enabled = False
        both.give_up()
        assert torch.get_default_dtype() == torch.float64

    mkldnn = MKLDNN.enabled
    with isolate_torch(1, []) as turns:
        both = Both(turns)
        turns.join("one", casts)
        turns.join("two", plain)
        turns.play()
    assert [each.dtype for each in found["one"]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [each.requires_grad for each in found["one"]] == [False, False, True]
    assert [each.dtype for each in found["two"]] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert [each[0, 0].item() for each in found["two"]] == [1.0, 2.0, 6.0]
    assert [each[0, 0].item() for each in found["one"]] == [1.0, 6.0, 6.0]
    assert torch.get_default_dtype() == torch.float32
    assert MKLDNN.enabled is mkldnn
