"""The one way out of a party: what a phase declares, through its chain, as bundles over a link or a hub, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vfl_common.bundle import Bundle, BundleSpec, Kind, StepKey
from vfl_common.errors import Code, InputError
from vfl_common.link import Hub, Link
from vfl_party.declared import Exchange
from vfl_party.filter import Filter, Tensors
from vfl_party.tensors import take_in, to_bundle


class Ways(Protocol):
    """The links and the hub of one generation, as a phase finds them when it runs."""

    @property
    def link(self) -> Link | None:
        """To the active party; None at the active party."""
        ...

    @property
    def hub(self) -> Hub | None:
        """The active party's own; None at a passive party."""
        ...

    @property
    def server(self) -> Link | None:
        """To the aggregation server; None if no phase of the run aggregates."""
        ...


class Chain:
    """The filters of one direction of an exchange, in the order in which they are applied: fixed when it is made."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self.filters = tuple(filters)
        # What changes nothing is not called, a thousand times a second.
        self._apply = [each for each in self.filters if type(each).apply is not Filter.apply]
        self._undo = [each for each in reversed(self.filters) if type(each).undo is not Filter.undo]
        self._specs: dict[int, tuple[BundleSpec, BundleSpec]] = {}  # by identity; kept, so that no id is used again

    def apply(self, tensors: Tensors) -> Tensors:
        """What goes to the wire. Raises VflError if it may not."""
        for each in self._apply:
            tensors = each.apply(tensors)
        return tensors

    def undo(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the receiver works with."""
        found: Tensors = tensors
        for each in self._undo:
            found = each.undo(found)
        return dict(found) if self._undo else tensors

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """What crosses the wire of tensors of ``spec``."""
        known = self._specs.get(id(spec))
        if known is None:
            changed = spec
            for each in self.filters:
                changed = each.wire_spec(changed)
            known = self._specs[id(spec)] = (spec, changed)
        return known[1]

    def state(self) -> list[dict[str, Any] | None]:
        """Of each filter."""
        return [each.state() for each in self.filters]

    def load_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Resumes with what ``state`` gave."""
        for each, state in zip(self.filters, states, strict=True):
            if state is not None:
                each.load_state(state)

    def __str__(self) -> str:
        return " -> ".join(each.text for each in self.filters) or "as it is"


@dataclass(frozen=True)
class Chains:
    """Both directions of an exchange."""

    up: Chain
    down: Chain

    def state(self) -> list[list[dict[str, Any] | None]] | None:
        """Of both; None if there is none."""
        states = [self.up.state(), self.down.state()]
        return states if any(each is not None for state in states for each in state) else None

    def load_state(self, states: Sequence[Sequence[dict[str, Any] | None]]) -> None:
        """Resumes with what ``state`` gave."""
        self.up.load_state(states[0])
        self.down.load_state(states[1])


class Asking:
    """The asking side of one exchange of a phase; tensors arrive on ``device``, checked to be finite."""

    def __init__(
        self,
        exchange: Exchange,
        phase: str,
        chains: Chains,
        ways: Ways,
        peer: str,
        device: torch.device,
        sizes: Mapping[str, int],
    ) -> None:
        self.exchange, self.phase, self.chains, self.peer = exchange, phase, chains, peer
        self._ways, self._device, self._sizes = ways, device, sizes

    @property
    def link(self) -> Link:
        """Raises InputError if this party has no such link: the active party asks nobody but the server."""
        link = self._ways.server if self.exchange.asks == "server" else self._ways.link
        if link is None:
            text = f"{self.exchange.name}: this party has no link to {self.peer}"
            raise InputError(Code.ROLE_MISMATCH, text)
        return link

    def swap(self, step: StepKey, tensors: Tensors, **sizes: int) -> dict[str, Tensor]:
        """``send`` and ``receive``."""
        self.send(step, tensors)
        return self.receive(step, **sizes)

    def send(self, step: StepKey, tensors: Tensors) -> None:
        """Sends ``tensors`` (without their graph); they may be changed afterwards. Raises as ``Link.send``."""
        self.link.send(step, to_bundle(self.exchange.up.kind, self.chains.up.apply(tensors)))

    def receive(self, step: StepKey, **sizes: int) -> dict[str, Tensor]:
        """Waits for the reply: the peer's tensors, without gradient. Raises as ``Link.receive``."""
        spec = self.chains.down.wire_spec(self.exchange.down.spec(**{**self._sizes, **sizes}))
        reply = take_in(self.link.receive(step, spec), self._device, party=self.peer, step=step)
        return self.chains.down.undo(reply)


class Answering:
    """The computing side of one exchange of a phase; tensors arrive on ``device``, checked to be finite."""

    def __init__(
        self,
        exchange: Exchange,
        phase: str,
        chains: Chains,
        ways: Ways,
        device: torch.device,
        sizes: Mapping[str, int],
    ) -> None:
        self.exchange, self.phase, self.chains = exchange, phase, chains
        self._ways, self._device, self._sizes = ways, device, sizes

    @property
    def hub(self) -> Hub:
        """Raises InputError at a passive party."""
        if self._ways.hub is None:
            raise InputError(Code.ROLE_MISMATCH, f"{self.exchange.name}: this party is not the active party")
        return self._ways.hub

    def collect(self, step: StepKey, *, deadline_s: float = math.inf, **sizes: int) -> dict[str, dict[str, Tensor]]:
        """{party: its tensors, without gradient}, in roster order; the late are left out. Raises as ``Hub.collect``."""
        spec = self.chains.up.wire_spec(self.exchange.up.spec(**{**self._sizes, **sizes}))
        received: dict[str, dict[str, Tensor]] = {}

        def arrived(party: str, bundle: Bundle) -> None:
            received[party] = self.chains.up.undo(take_in(bundle, self._device, party=party, step=step))

        return {party: received[party] for party in self.hub.collect(step, spec, arrived, deadline_s)}

    def reply(self, step: StepKey, tensors: Mapping[str, Tensors]) -> None:
        """Answers each party with its own tensors."""
        kind, chain = self.exchange.down.kind, self.chains.down
        self.hub.reply(step, {party: to_bundle(kind, chain.apply(each)) for party, each in tensors.items()})

    def reply_all(self, step: StepKey, parties: Iterable[str], tensors: Tensors) -> None:
        """Answers all ``parties`` with the same tensors, which go through the chain once."""
        bundle = to_bundle(self.exchange.down.kind, self.chains.down.apply(tensors))
        self.hub.reply(step, dict.fromkeys(parties, bundle))

    def acknowledge(self, step: StepKey, parties: Iterable[str]) -> None:
        """Answers all ``parties`` with nothing."""
        self.hub.reply(step, {party: Bundle(Kind.ACK) for party in parties})
