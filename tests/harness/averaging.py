"""A method for tests: only weights, which drift at each party and are averaged at the server once a
round.

A party whose folder has ``hold-<party>-<phase>-<round>`` waits before it sends; ``sent-…`` appears
once it has sent.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.base import Section
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import derive_seed
from vfl_party.outbound.declared import Exchange, Sent
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method

HOLD_S = 60.0


class AveragingSettings(Section):
    rounds: int = 3
    width: int = 3
    widths: dict[str, int] = {}  # noqa: RUF012 - pydantic copies it; for single parties
    # The party that sends infinity.
    sick: str = ""


class Averaging(Phase):
    def __init__(self, party: Party, name: str, settings: AveragingSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._sick = party, settings.sick == party.name
        layer = nn.Linear(4, settings.widths.get(party.name, settings.width))
        self._weights: dict[str, Tensor] = dict(layer.named_parameters())
        with torch.no_grad():
            for key, tensor in self._weights.items():
                tensor.copy_(drift(party.name, name, -1, key, tensor))
        party.models[name] = layer.to(party.device)
        sent = Sent(
            Kind.WEIGHTS,
            {key: (each.dtype, tuple(each.shape)) for key, each in self._weights.items()},
        )
        self._mean = party.exchanges.open_asking(
            name, Exchange("weights", sent, sent, asks="server")
        )

    @torch.no_grad()
    def run_round(self, round_: int) -> RoundReport:
        party = self._party
        for key, tensor in self._weights.items():
            tensor += drift(party.name, self.name, round_, key, tensor)
            if self._sick:
                tensor.view(-1)[0] = float("inf")
        place = f"{party.name}-{self.name}-{round_}"
        give_up_s = time.monotonic() + HOLD_S
        while Path(f"hold-{place}").exists() and time.monotonic() < give_up_s:
            time.sleep(0.01)
        step = StepKey(self.name, round_, 0)
        self._mean.send(step, self._weights)
        Path(f"sent-{place}").touch()
        for key, tensor in self._mean.receive(step).items():
            self._weights[key].copy_(tensor)
        return RoundReport(1)


def drift(party: str, phase: str, round_: int, key: str, like: Tensor) -> Tensor:
    """Returns what a party adds to a tensor in a round; -1: its initial weights."""
    generator = torch.Generator().manual_seed(derive_seed(0, party, phase, str(round_), key))
    return torch.randn(like.shape, generator=generator)


METHOD = Method(AveragingSettings, Averaging, Averaging)
