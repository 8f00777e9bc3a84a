"""The server's part in private alignment, beside its aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vfl_common.bundle import BundleSpec, Hub, Kind
from vfl_common.errors import VflError
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryPipe
from vfl_common.stages import AggregationPlan
from vfl_server.aggregation import AggregatedRun, Aggregator

RING = ("p0", "p1")


class _Service:
    def __init__(self) -> None:
        self.hubs: list[Any] = []

    def use(self, hub: Any) -> None:
        self.hubs.append(hub)

    def close(self) -> None:
        pass


def test_parties_that_plan_before_the_server_has_turned_round_keep_their_hub() -> None:
    """With another one, the streams that they have opened would end."""
    service, acts, failed = _Service(), dict[str, Callable[[], None]](), list[VflError]()

    def align(_hub: Hub) -> Callable[[], None]:
        return lambda: aggregator.begin(
            1, "", [AggregationPlan("phase", 1, BundleSpec(Kind.WEIGHTS))]
        )

    aggregator = Aggregator(
        service,
        AggregatedRun("run", RING, RING[1:], ["phase"]),
        timeout_s=1.0,
        fail=failed.append,
        align=align,
        make_hub=lambda _generation: ExchangeHub(MemoryPipe("server", RING), timeout_s=1.0),
        start=acts.__setitem__,
    )
    aggregator.open(1)
    acts["alignment"]()
    assert list(acts) == ["alignment", "aggregation"]
    assert len(service.hubs) == 1
    assert not failed
