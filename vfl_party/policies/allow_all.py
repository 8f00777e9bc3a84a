"""Lets out everything that the phases declare."""

from __future__ import annotations

from vfl_party.declared import Exchange
from vfl_party.filter import Filter


class AllowAll(Filter):
    """Allows all; see ``Policy``."""

    text = "allow all"

    def __call__(self, _phase: str, _exchange: Exchange, /) -> Filter:
        return self


POLICY = AllowAll
