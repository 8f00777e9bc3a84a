"""The result of ``vfl-party forecast``, which ``vfl forecast`` reads."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from vfl_common.ledger import CONTROL
from vfl_common.summary import Bytes, ExchangeSummary, LinkBytes


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class StepRun(_Model):
    """Successive steps of one exchange in a round, which determine its time.

    ``times``: rounds with such steps. ``steps``: of one round, of which up to ``in_flight`` run at
    once; ``parts`` of them make a batch, and are answered before the next one is sent or updated.
    Bytes and messages are of all these steps and of all asking parties; ``up`` goes to the
    answering party, ``down`` comes back. ``trains``: whether these are the main steps of the phase,
    not validation.
    """

    exchange: str
    trains: bool
    times: int
    steps: int
    in_flight: int
    parts: int = 1
    up_bytes: int
    down_bytes: int
    up_messages: int
    down_messages: int


class PhaseForecast(_Model):
    """One phase.

    ``round_trips``: answered steps; ``at_most``: it may end early (early stopping); ``unknown``:
    its method states no traffic, so it is not counted; ``bound``: why the numbers are upper bounds
    even without an early end, or ''. ``runs``: steps from which its time is computed.
    """

    name: str
    kind: str
    round_trips: int = 0
    at_most: bool = False
    unknown: bool = False
    bound: str = ""
    runs: tuple[StepRun, ...] = ()


class EncoderLoad(_Model):
    """What one party's encoder, or bottom model, computes and keeps.

    Args:
        rows: of the party's training, including those that it uses alone.
        weights: number of trained parameters.
        weight_bytes: bytes of the parameters; gradients take as much, and Adam's two averages twice
            as much.
        flops_a_row: floating-point operations of a forward pass of one row. A multiply-add counts
            as two; fvcore, which MocoSFL uses, counts it as one.
        kept_bytes_a_row: bytes of one row that a forward pass in training keeps for the backward
            pass.
    """

    party: str
    rows: int
    weights: int
    weight_bytes: int
    flops_a_row: int
    kept_bytes_a_row: int


class CountedForecast(_Model):
    """All phases that exchange tensors, beginning with the comparison of rows (``open``).

    The sessions with the server (``control``) are left out: they grow with time. ``links``: as
    ``bytes.by_link`` of a summary. ``exchanges``: as in a summary. ``encoders``: of the parties
    whose rows are here.
    """

    recipe: str
    rows: int
    server: str
    parties: tuple[str, ...]
    phases: tuple[PhaseForecast, ...]
    links: tuple[LinkBytes, ...]
    exchanges: tuple[ExchangeSummary, ...] = ()
    encoders: tuple[EncoderLoad, ...] = ()


class LinkError(_Model):
    """The forecast and the counted message bytes from one process to another in one phase."""

    sender: str
    receiver: str
    phase: str
    forecast: int
    counted: int

    @property
    def ratio(self) -> float:
        """The forecast's relative error: 0.03 is 3 % too much; infinite if nothing was counted."""
        if self.forecast == self.counted:
            return 0.0
        return self.forecast / self.counted - 1 if self.counted else math.inf


def compare_with_ledger(forecast: CountedForecast, counted: Bytes) -> list[LinkError]:
    """Compares a forecast with the run's ledger, link by link; leaves out the sessions with the
    server.
    """
    sums: dict[tuple[str, str, str], list[int]] = {}
    for place, links in enumerate((forecast.links, counted.by_link)):
        for link in links:
            if link.phase != CONTROL:
                sums.setdefault((link.sender, link.receiver, link.phase), [0, 0])[place] += (
                    link.message_bytes
                )
    return [
        LinkError(sender=sender, receiver=receiver, phase=phase, forecast=ours, counted=theirs)
        for (sender, receiver, phase), (ours, theirs) in sums.items()
    ]
