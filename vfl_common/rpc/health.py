"""The service ``grpc.health.v1``, with which containers and orchestrators check whether a listening
process serves.

It offers only ``Check``. ``Watch`` would occupy a thread of the pool without a time limit. The
protocol allows a server to omit it, and callers then use ``Check``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import grpc
from grpc_health.v1 import health_pb2

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.rpc.channel import (
    CallLimit,
    Context,
    Handler,
    connect,
    get_caller_name,
    split_address,
)

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING, _NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
# The maximum number of concurrent checks of one caller. Two probes of a machine may overlap.
MAX_CHECKS = 2
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to be dialled, not bound


class Health:
    """Reports to permitted callers whether a service of this process serves. The service name
    ``''`` means all services.

    Args:
        services: {full name of a service: function that returns whether it serves now}.
        keyring: This process's credentials, with the list of revoked certificates.
        may_ask: The names of permitted callers. They include this process's own name, which a probe
            on the same machine uses.
    """

    def __init__(
        self, services: Mapping[str, Callable[[], bool]], keyring: Keyring, may_ask: Collection[str]
    ) -> None:
        self._services, self._keyring, self._may_ask = dict(services), keyring, frozenset(may_ask)
        self._places = CallLimit(MAX_CHECKS, "checks")

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        # The method is a stream for the reason given in ``stream_handler``.
        check = grpc.stream_stream_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check})

    def _check(
        self, requests: Iterator[health_pb2.HealthCheckRequest], context: Context
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        try:
            name = get_caller_name(context, self._keyring)
        except PeerError:
            name = ""
        if name not in self._may_ask:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "only members of this federation may ask"
            )
        try:
            with self._places.hold(name):
                request = next(requests, health_pb2.HealthCheckRequest())
        except PeerError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.public)
        if request.service and request.service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, "this process has no such service")
        requested = [
            serves for name, serves in self._services.items() if request.service in ("", name)
        ]
        yield health_pb2.HealthCheckResponse(
            status=_SERVING if all(serves() for serves in requested) else _NOT_SERVING
        )


def require_serving(listen: str, credentials: Credentials, timeout_s: float) -> str:
    """Checks that the process of the same name on this machine, which listens on ``listen``,
    serves. Returns its address.

    Raises:
        InputError: The process cannot be reached.
        PeerError: UNREACHABLE, if the process does not serve or does not answer.
    """
    address, me = _loopback_address(listen), credentials.name
    channel = connect(address, credentials, me, timeout_s)
    if isinstance(channel, VflError):
        raise channel
    with channel:
        check = channel.unary_unary(
            f"/{SERVICE}/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            status = check(health_pb2.HealthCheckRequest(), timeout=timeout_s).status
        except grpc.RpcError as error:
            reason = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            raise PeerError(
                Code.UNREACHABLE,
                f"{me!r} at {address} does not report whether it serves ({reason}). Check that it "
                "is not an older version.",
                party=me,
            ) from None
    if status != _SERVING:
        raise PeerError(
            Code.UNREACHABLE, f"{me!r} at {address} does not serve: its run has ended", party=me
        )
    return address


def _loopback_address(listen: str) -> str:
    """Returns the address at which to reach a process on this machine that listens on ``listen``.
    Raises InputError.
    """
    host, port = split_address(listen)
    host = _ANY_ADDRESS.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
