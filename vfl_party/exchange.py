"""Link and Hub in tensors: what the loops of the methods call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vfl_common.bundle import Bundle, BundleSpec, Kind, StepKey
from vfl_common.link import Hub, Link
from vfl_party.tensors import spec_of, take_in, to_bundle

Tensors = Mapping[str, Tensor]


@lru_cache(maxsize=256)  # a phase expects few shapes, thousands of times
def expect(kind: Kind, **tensors: tuple[torch.dtype, tuple[int, ...]]) -> BundleSpec:
    """The spec of a bundle: ``expect(Kind.EMBEDDING, z=(torch.float32, (B, E)))``."""
    return BundleSpec(kind, {name: spec_of(dtype, *shape) for name, (dtype, shape) in tensors.items()})


NOTHING = BundleSpec(Kind.ACK)


@dataclass(frozen=True)
class TensorLink:
    """The asking side; tensors arrive on ``device``, checked to be finite."""

    link: Link
    peer: str
    device: torch.device

    def swap(self, step: StepKey, kind: Kind, tensors: Tensors, expect: BundleSpec) -> dict[str, Tensor]:
        """``send`` and ``receive``."""
        self.send(step, kind, tensors)
        return self.receive(step, expect)

    def send(self, step: StepKey, kind: Kind, tensors: Tensors) -> None:
        """Sends ``tensors`` (without their graph); they may be changed afterwards. Raises as ``Link.send``."""
        self.link.send(step, to_bundle(kind, tensors))

    def receive(self, step: StepKey, expect: BundleSpec) -> dict[str, Tensor]:
        """Waits for the reply: the peer's tensors, without gradient. Raises as ``Link.receive``."""
        return take_in(self.link.receive(step, expect), self.device, party=self.peer, step=step)


@dataclass(frozen=True)
class TensorHub:
    """The computing side; tensors arrive on ``device``, checked to be finite."""

    hub: Hub
    device: torch.device

    def collect(self, step: StepKey, expect: BundleSpec, deadline_s: float = math.inf) -> dict[str, dict[str, Tensor]]:
        """{party: its tensors, without gradient}, in roster order; the late are left out. Raises as ``Hub.collect``."""
        received: dict[str, dict[str, Tensor]] = {}

        def arrived(party: str, bundle: Bundle) -> None:
            received[party] = take_in(bundle, self.device, party=party, step=step)

        return {party: received[party] for party in self.hub.collect(step, expect, arrived, deadline_s)}

    def reply(self, step: StepKey, kind: Kind, tensors: Mapping[str, Tensors]) -> None:
        """Answers each party with its tensors."""
        self.hub.reply(step, {party: to_bundle(kind, each) for party, each in tensors.items()})

    def acknowledge(self, step: StepKey, parties: Mapping[str, object]) -> None:
        """Answers each party with nothing."""
        self.hub.reply(step, {party: Bundle(Kind.ACK) for party in parties})
