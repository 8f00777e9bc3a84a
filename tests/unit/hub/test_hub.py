"""The requests of members: the thread that answers them, and the news for which they wait."""

from __future__ import annotations

import asyncio
import inspect
import time
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute

from vfl.certs import authority
from vfl_common.process.logs import Console
from vfl_hub import hub as hub_module
from vfl_hub.hub import FederationHub, SyncRequest, make_application
from vfl_hub.store import open_store


def test_all_requests_are_answered_in_the_thread_of_the_loop() -> None:
    routes = [
        route for route in make_application(cast(Any, None)).routes if isinstance(route, APIRoute)
    ]
    calls = [route.endpoint for route in routes]
    calls += [one.call for route in routes for one in route.dependant.dependencies if one.call]
    assert len(calls) > len(routes)
    assert all(inspect.iscoroutinefunction(call) for call in calls)


class ServerStub:
    """The server of a run that goes on."""

    state, reason, port = "runs", "", 1

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("absent_s", [-1.0, 3600.0])
def test_a_run_fails_if_a_party_is_away_for_too_long(
    absent_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ABSENT_S", absent_s)
    authority.create_authority(tmp_path, "vfl")
    tls, store = authority.issue(tmp_path, "server"), open_store(tmp_path)
    hub = FederationHub(tmp_path, store, tls, "server", 4, Console("vfl-server"))
    store.propose("0" * 64, "bank", "churn", ["bank", "shop"], {}, time.time() + 60.0)
    for state in ("queued", "running"):
        store.move("0" * 64, cast(Any, state))
    hub._servers["0" * 64] = cast(Any, ServerStub())
    hub._advance()
    (entry,) = store.entries()
    is_away = absent_s < 0
    assert entry.state == ("failed" if is_away else "running")
    assert entry.reason == ("bank was away for a day" if is_away else "")
    store.close()
    hub._lock_file.close()


def test_an_event_wakes_only_the_members_that_it_concerns(tmp_path: Path) -> None:
    authority.create_authority(tmp_path, "vfl")
    tls, store = authority.issue(tmp_path, "server"), open_store(tmp_path)
    for name in ("bank", "shop", "clinic"):
        store.add_member(name, f"sha256:{name}", ["main"])
    hub = FederationHub(tmp_path, store, tls, "server", 4, Console("vfl-server"))

    async def ask() -> None:
        waiting = {
            name: asyncio.create_task(hub.sync(name, SyncRequest()))
            for name in ("bank", "shop", "clinic")
        }
        await asyncio.sleep(0)
        store.propose("0" * 64, "bank", "churn", ["bank", "shop"], {}, time.time() + 60.0)
        hub._wake()
        for name in ("bank", "shop"):
            answer = await asyncio.wait_for(waiting[name], 10.0)
            assert [entry["id"] for entry in answer["proposals"]] == ["0" * 64]
        assert not waiting["clinic"].done()
        # Its next request begins after the event.
        waiting["clinic"].cancel()

    asyncio.run(ask())
    # One proposal that this release cannot read fails, and the others go on.
    store.propose("1" * 64, "bank", "churn", ["bank", "shop"], {}, 1.0)
    for state in ("queued", "running"):
        store.move("0" * 64, state)
    assert hub._advance()
    assert [entry.state for entry in store.entries()] == ["failed", "expired"]
    store.close()
    hub._lock_file.close()
