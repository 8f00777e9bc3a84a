"""grpc.health.v1 over mutual TLS: who may ask, what is answered."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.contract.exchanges import WAIT_S, credentials, keyring
from tests.harness.errors import raises
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.channel import dial, run_server
from vfl_common.rpc.health import SERVICE, Health, require_serving

ME = "active"
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


@pytest.fixture
def up() -> dict[str, bool]:
    """Which of two services serve; tests change it."""
    return {"vfl.v1.Control": True, "vfl.v1.Exchange": True}


@pytest.fixture
def address(up: dict[str, bool]) -> Iterator[str]:
    services = {
        "vfl.v1.Control": lambda: up["vfl.v1.Control"],
        "vfl.v1.Exchange": lambda: up["vfl.v1.Exchange"],
    }
    health = Health(services, keyring(ME), may_ask=[ME, "north"])
    with run_server("127.0.0.1:0", keyring(ME), [health], 4) as (_, found):
        yield found


def ask(address: str, caller: str, service: str = "") -> int:
    """The status, as any client of the protocol asks for it."""
    with dial(address, credentials(caller), ME) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        return int(health_pb2.HealthCheckResponse.FromString(check(request, timeout=WAIT_S)).status)


def refusal(address: str, caller: str, service: str = "") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        ask(address, caller, service)
    return caught.value.code()


def test_each_service_and_all_together(address: str, up: dict[str, bool]) -> None:
    assert [ask(address, "north", name) for name in ("", *up)] == [SERVING] * 3
    up["vfl.v1.Exchange"] = False
    assert [ask(address, "north", name) for name in ("", *up)] == [
        NOT_SERVING,
        SERVING,
        NOT_SERVING,
    ]
    assert refusal(address, "north", "vfl.v1.Nothing") is grpc.StatusCode.NOT_FOUND


def test_who_may_ask(address: str) -> None:
    """A certificate of the federation's CA is not enough: its name must be in the recipe."""
    assert ask(address, ME) == SERVING
    assert refusal(address, "stranger") is grpc.StatusCode.PERMISSION_DENIED


def test_nobody_holds_a_thread_by_watching(address: str) -> None:
    with dial(address, credentials("north"), ME) as channel:
        watch = channel.unary_stream(f"/{SERVICE}/Watch")(b"", timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_probe_beside_the_process(address: str, up: dict[str, bool]) -> None:
    port = address.rpartition(":")[2]
    # What it listens on is not dialled.
    assert require_serving(f"0.0.0.0:{port}", credentials(ME), WAIT_S) == address
    up["vfl.v1.Control"] = False
    with raises(PeerError, Code.UNREACHABLE, names=("active", "127.0.0.1")):
        require_serving(address, credentials(ME), WAIT_S)
    with raises(InputError, Code.IDENTITY_MISMATCH, names=("active", "north")):
        require_serving(address, credentials("north"), 1.0)


def test_a_process_without_the_service() -> None:
    with (
        run_server("127.0.0.1:0", keyring(ME), [], 2) as (_, address),
        raises(PeerError, Code.UNREACHABLE, names=("active", "127.0.0.1")),
    ):
        require_serving(address, credentials(ME), WAIT_S)
