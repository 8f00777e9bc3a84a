"""Allows everything that the phases declare to leave."""

from __future__ import annotations

from vfl_party.outbound.declared import Exchange, Sent
from vfl_party.outbound.filter import Filter


class AllowAll(Filter):
    """Allows every exchange; see ``Policy``."""

    text = "allow all"

    def __call__(self, _phase: str, _exchange: Exchange, _sent: Sent, /) -> Filter:
        return self


POLICY = AllowAll
