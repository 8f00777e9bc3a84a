"""What a party lets out at all: one file a policy, found by its name. Each party chooses its own, in its party file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from vfl_party.declared import Exchange
from vfl_party.filter import Filter
from vfl_party.plugins import Room

ROOM = Room(sys.modules[__name__], "vfl.policies", "POLICY", "policy")


class Policy(Protocol):
    """Makes, when a phase is made, the filter of what one exchange lets out of this party."""

    def __call__(self, phase: str, exchange: Exchange, /) -> Filter:
        """Raises InputError if nothing of the exchange may ever leave; the filter's ``apply`` may refuse later."""
        ...


def load(name: str, where: str) -> Policy:
    """Raises InputError that names ``where`` if there is no policy of that name."""
    found: Callable[[], Policy] = ROOM.load(name, where)
    return found()
