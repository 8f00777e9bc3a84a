"""The result of ``vfl-party forecast``, which ``vfl forecast`` reads."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from vfl_common.bundle import CONTROL
from vfl_common.summary import Bytes, ExchangeSummary, LinkBytes


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class StepRun(_Model):
    """Successive steps of one exchange in a round, from which the time is computed.

    Args:
        exchange: The name of the exchange.
        trains: Whether these are the main steps of the phase, and not validation.
        times: The number of rounds with such steps.
        steps: The number of steps in one round.
        in_flight: The maximum number of steps that run at the same time.
        parts: The number of steps that make up a batch. They are answered before the next batch.
        up_bytes: The bytes of all these steps from all requesting parties.
        down_bytes: The bytes of all answers.
        up_messages: The number of messages from all requesting parties.
        down_messages: The number of messages in all answers.
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
    """The forecast of one phase.

    Args:
        name: The name of the phase.
        kind: The kind of the phase.
        round_trips: The number of answered steps.
        at_most: Whether the phase can stop early, so that the numbers are upper bounds.
        unknown: Whether the phase is not counted, because its method declares no traffic.
        bound: The reason why the numbers are upper bounds even without early stopping, or ''.
        runs: The steps from which the time is computed.
    """

    name: str
    kind: str
    round_trips: int = 0
    at_most: bool = False
    unknown: bool = False
    bound: str = ""
    runs: tuple[StepRun, ...] = ()


class EncoderLoad(_Model):
    """The operations and the memory of one party's encoder or bottom model.

    Args:
        party: The party's name.
        rows: The number of the party's training rows, including rows that only this party uses.
        weights: The number of trained parameters.
        weight_bytes: The bytes of the parameters. Gradients take the same, and Adam's two averages
            twice as much.
        flops_a_row: The floating-point operations of a forward pass for one row. A multiply-add
            counts as two. fvcore, which MocoSFL uses, counts it as one.
        kept_bytes_a_row: The bytes for one row that a forward pass saves for the backward pass.
    """

    party: str
    rows: int
    weights: int
    weight_bytes: int
    flops_a_row: int
    kept_bytes_a_row: int


class CountedForecast(_Model):
    """The forecast of a run, with all phases that exchange tensors.

    The first phase is the comparison of rows (``open``). The sessions with the server (``control``)
    are left out, because their bytes grow with time.

    Args:
        recipe: The name of the recipe.
        rows: The number of rows.
        server: The name of the server.
        parties: The names of the parties.
        phases: The forecasts of the phases.
        links: The bytes of each link, in the form of ``bytes.by_link`` in a summary.
        exchanges: The exchanges, in the form of a summary.
        encoders: The encoders of the parties whose rows are here.
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
    """The forecast and the measured message bytes from one process to another in one phase."""

    sender: str
    receiver: str
    phase: str
    forecast: int
    counted: int

    @property
    def ratio(self) -> float:
        """The relative error of the forecast. 0.03 means 3 % too much.

        It is infinite if the ledger has no bytes.
        """
        if self.forecast == self.counted:
            return 0.0
        return self.forecast / self.counted - 1 if self.counted else math.inf


def compare_with_ledger(forecast: CountedForecast, counted: Bytes) -> list[LinkError]:
    """Compares a forecast with a run's ledger for each link, without sessions with the server."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for place, links in enumerate((forecast.links, counted.by_link)):
        for link in links:
            if link.phase != CONTROL:
                sums.setdefault((link.sender, link.receiver, link.phase), [0, 0])[place] += (
                    link.message_bytes
                )
    return [
        LinkError(
            sender=sender,
            receiver=receiver,
            phase=phase,
            forecast=forecast_bytes,
            counted=ledger_bytes,
        )
        for (sender, receiver, phase), (forecast_bytes, ledger_bytes) in sums.items()
    ]
