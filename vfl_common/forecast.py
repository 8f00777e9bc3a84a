"""What a run is going to exchange: what ``vfl-party forecast`` tells ``vfl forecast``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from vfl_common.summary import LinkBytes


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class PhaseForecast(_Model):
    """One phase. ``round_trips``: steps that wait for one another; ``at_most``: it may end early (early stopping);
    ``unknown``: its method states no traffic, so nothing of it is counted."""

    name: str
    kind: str
    round_trips: int = 0
    at_most: bool = False
    unknown: bool = False


class Forecast(_Model):
    """All phases that exchange tensors, the comparison of rows (``open``) first. The sessions with the server
    (``control``) are not in it: they grow with time. ``links``: as ``bytes.by_link`` of a summary."""

    recipe: str
    rows: int
    server: str
    parties: tuple[str, ...]
    phases: tuple[PhaseForecast, ...]
    links: tuple[LinkBytes, ...]
