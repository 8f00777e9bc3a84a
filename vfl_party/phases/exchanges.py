"""Defines the exchanges of a party, as its phases open them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Generic, TypeVar

import torch

from vfl_common.bundle import PROTOCOL, Hub, Link, StepKey
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import Rows
from vfl_party.base.step_timing import Clock
from vfl_party.outbound.chain import Chains, SentDigests
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Role
from vfl_party.outbound.exchange import Answering, Asking, Connections
from vfl_party.outbound.policies import Policy
from vfl_party.phases.rows import PartyRows
from vfl_party.record.recorder import Recorder

P = TypeVar("P")


class PartyConnections:
    """The connections of a party in its current generation. Implements ``Connections``, and has
    neither a link nor a hub before ``connect``.
    """

    def __init__(self) -> None:
        self._current: Connections | None = None

    def connect(self, connections: Connections | None) -> None:
        """Connects the phases to the other parties. ``connections``: None for no connections."""
        self._current = connections

    @property
    def link(self) -> Link | None:
        """See ``Connections``."""
        return self._current.link if self._current is not None else None

    @property
    def hub(self) -> Hub | None:
        """See ``Connections``."""
        return self._current.hub if self._current is not None else None

    @property
    def server(self) -> Link | None:
        """See ``Connections``."""
        return self._current.server if self._current is not None else None

    @property
    def clock(self) -> Clock:
        """See ``Connections``."""
        return self._current.clock if self._current is not None else Clock()

    @property
    def protocol(self) -> int:
        """See ``Connections``."""
        return self._current.protocol if self._current is not None else PROTOCOL

    @property
    def record(self) -> Recorder | None:
        """See ``Connections``."""
        return self._current.record if self._current is not None else None

    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers are connected, because they may still be
        computing alone.
        """
        for connection in (self.link, self.hub):
            if connection is not None:
                connection.unhurried()


class PartyExchanges(Generic[P]):
    """The exchanges that a party's phases open, and the sizes of what they send.

    Args:
        party: The party's name in the recipe.
        recipe: The run's recipe.
        device: The device of tensors that arrive.
        rows: The party's rows.
        policy: Decides what this party may send.
        sent: Digests of the values that were sent in earlier generations.
        get_width: Returns the width of this party's embeddings.

    ``connections``: The links and the hub of the current generation. ``opened``: {(phase,
    exchange's name): this party's side}, for the exchanges that the phases have opened. ``others``:
    {other party: its ``Party``} in a forecast that has all parties' data; empty otherwise.
    """

    def __init__(
        self,
        party: str,
        recipe: Recipe,
        device: torch.device,
        rows: PartyRows,
        policy: Policy,
        sent: SentDigests,
        get_width: Callable[[], int],
    ) -> None:
        self._party, self._recipe, self._device, self._rows = party, recipe, device, rows
        self._policy, self._sent, self._get_width = policy, sent, get_width
        self.connections = PartyConnections()
        self.opened: dict[tuple[str, str], Asking | Answering] = {}
        self.others: Mapping[str, P] = {}

    def make_chains(self, phase: str, exchange: Exchange) -> Chains:
        """Makes the chains of an exchange of ``phase``: transforms, this party's policy, the
        phase's codec.

        Raises InputError if the recipe names an unknown transform or codec, or if the policy
        refuses.
        """
        role: Role = "active" if self._party == self._recipe.active.name else "passive"
        return make_chains(
            self._recipe, phase, exchange, role, self._policy, self._party, self._sent
        )

    def open_asking(self, phase: str, exchange: Exchange, **sizes: int) -> Asking:
        """Opens this party's asking side of an exchange. ``sizes``: The sizes that are the same at
        every step.

        Raises as ``make_chains``.
        """
        peer = self._recipe.server if exchange.asks == "server" else self._recipe.active.name
        chains, device = self.make_chains(phase, exchange), self._device
        asking = Asking(exchange, phase, chains, self.connections, peer, device, sizes)
        self.opened[phase, exchange.name] = asking
        return asking

    def open_answering(
        self, phase: str, exchange: Exchange, **sizes: int | Mapping[str, int]
    ) -> Answering:
        """Opens the active party's answering side of an exchange; see ``open_asking``. A size that
        may differ between passive parties is a dict {passive party: its size}.
        """
        chains, device = self.make_chains(phase, exchange), self._device
        answering = Answering(exchange, phase, chains, self.connections, device, sizes)
        self.opened[phase, exchange.name] = answering
        return answering

    def list_occurrences(self, exchange: Exchange, step: StepKey, **sizes: int) -> list[Occurrence]:
        """Returns the occurrences of an exchange of embeddings at ``step``, for a forecast: one for
        all passive parties, or one for each if their ``widths`` differ.
        """
        if len(set(self.widths.values())) < 2:
            width = next(iter(self.widths.values()), self.width)
            return [Occurrence.of(exchange, step, **sizes, width=width)]
        return [
            replace(Occurrence.of(exchange, step, **sizes, width=width), party=name)
            for name, width in self.widths.items()
        ]

    def list_joint_occurrences(
        self, exchange: Exchange, step: StepKey, rows: Rows
    ) -> list[Occurrence]:
        """Returns the occurrences of an exchange of embeddings of ``rows``, one for each passive
        party that has some of the rows. ``rows``: Row numbers that are common to all parties.
        """
        sizes = self._rows.get_sizes(rows)
        if sizes is None:
            return self.list_occurrences(exchange, step, rows=len(rows))
        return [
            replace(
                Occurrence.of(exchange, step, **party_sizes, width=self.widths[name]), party=name
            )
            for name, party_sizes in sizes.items()
        ]

    @property
    def bound(self) -> str:
        """The reason why a forecast's sizes are upper bounds; '' if they are exact."""
        unknown = self._recipe.rows.partial and self._rows.data.held is None
        return (
            "it is not known which party has which rows, so the bytes are for all parties with "
            "all rows" * unknown
        )

    @property
    def width(self) -> int:
        """The width of this party's embeddings."""
        return self._get_width()

    @cached_property
    def widths(self) -> dict[str, int]:
        """{passive party: the width of its embeddings}."""
        return {
            party.name: self._recipe.embedding_size(party.name) for party in self._recipe.passives
        }
