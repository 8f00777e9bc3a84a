"""Forecasts the bytes that a recipe sends, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.data import add_data
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.simulation.federation import are_party_files
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.summary import ByteCount
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from vfl_party.forecast.result import CountedForecast, EncoderLoad


class Forecast:
    """The bytes that a recipe will send, counted exactly, without the sessions with the server.

    ``total``: the bytes of all phases. ``by_phase``: {phase: bytes}. ``rows``: the number of rows
    that all parties hold. ``encoders``: {party: the operations and memory of its encoder for a
    row}, for the parties whose data are available. For a phase with early stopping, or a phase that
    grows trees, the bytes are an upper bound.
    """

    def __init__(self, counted: CountedForecast) -> None:
        """Use ``forecast`` instead of this constructor."""
        from vfl.forecasting.show import sum_links

        self._counted = counted
        self.rows = counted.rows
        self.total: ByteCount = sum_links(counted.links)
        self.by_phase: dict[str, ByteCount] = {
            phase.name: sum_links(link for link in counted.links if link.phase == phase.name)
            for phase in counted.phases
        }
        self.encoders: dict[str, EncoderLoad] = {load.party: load for load in counted.encoders}

    def seconds(self, bandwidth: str = "100Mbit/s", latency: str = "20ms") -> float:
        """Estimates the seconds of the exchanges, without computation.

        ``bandwidth``: the bandwidth of each link. ``latency``: the one-way latency. Raises
        VflError.
        """
        from vfl.forecasting.network import Network
        from vfl.forecasting.show import compute_seconds

        network = Network.read(bandwidth, latency)
        return sum(compute_seconds(network, phase) for phase in self._counted.phases)

    def __repr__(self) -> str:
        return (
            f"Forecast({self._counted.recipe!r}, {self.rows:,} rows, "
            f"{self.total.payload_bytes:,} bytes of tensors)"
        )

    def _repr_html_(self) -> str:
        """Shows the tables of ``vfl forecast`` in a notebook."""
        from vfl.forecasting.network import Network
        from vfl.forecasting.show import render
        from vfl.summary.table import render_html

        return render_html(render(self._counted, Network.read("100Mbit/s", "20ms")))


def forecast(
    recipe: GivenRecipe,
    data: Mapping[str, Any] | None = None,
    *,
    plugins: RunPlugins | None = None,
    rows: int | None = None,
) -> Forecast:
    """Counts the bytes that a recipe will send.

    Args:
        recipe: as in ``simulate``; or the path of one party's file, whose data are then used.
        data: as in ``simulate``; only the number of rows affects the bytes.
        plugins: as in ``simulate``.
        rows: the number of rows that all parties hold; if given, no data are read.

    Raises VflError.
    """
    from vfl.forecasting.show import count_forecast
    from vfl_party.assembly.trial import modules_of
    from vfl_party.data import make_loader
    from vfl_party.forecast.count import forecast as count
    from vfl_party.forecast.count import outlook_of

    if isinstance(recipe, str | Path) and are_party_files([recipe]) and not data:
        with modules_of(Path(recipe).resolve().parent), with_plugins(plugins):
            return Forecast(count_forecast(Path(recipe), rows))
    loaded = Recipe.of(recipe)
    tables, frames = add_data(loaded.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    with modules_of(loaded.base), with_plugins(plugins):
        return Forecast(count(outlook_of(settings, loaded.base, make_loader(frames)), rows))
