"""``grpc.health.v1``: tells containers and orchestrators whether a listening process serves.

It offers only ``Check``. ``Watch`` occupies a thread of the pool as long as its caller likes; the
protocol lets a server omit it, and callers fall back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import grpc
from grpc_health.v1 import health_pb2

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.rpc.channel import CallLimit, Context, Handler, caller_name, connect, split_address

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING, _NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
# The most checks of one caller at the same time; two probes of a machine may overlap.
MAX_CHECKS = 2
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to be dialled, not bound


class Health:
    """Tells permitted callers whether a service of this process serves; the name ``''`` stands for
    all of them.

    Args:
        services: {full name of a service: returns whether it serves now}.
        keyring: this process's credentials, with the list of revoked certificates.
        may_ask: the names in certificates of permitted callers, with this process's own, which a
            probe on the same machine uses.
    """

    def __init__(
        self, services: Mapping[str, Callable[[], bool]], keyring: Keyring, may_ask: Collection[str]
    ) -> None:
        self._services, self._keyring, self._may_ask = dict(services), keyring, frozenset(may_ask)
        self._places = CallLimit(MAX_CHECKS, "checks")

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        # The method is a stream for the reason in ``stream_handler``.
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
            name = caller_name(context, self._keyring)
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
        asked = [serves for name, serves in self._services.items() if request.service in ("", name)]
        yield health_pb2.HealthCheckResponse(
            status=_SERVING if all(serves() for serves in asked) else _NOT_SERVING
        )


def require_serving(listen: str, credentials: Credentials, timeout_s: float) -> str:
    """Asks the process of the same name on this machine, which listens on ``listen``; returns its
    address if it serves.

    Raises:
        InputError: the process cannot be reached.
        PeerError: UNREACHABLE; it does not serve, or does not answer.
    """
    address, me = _to_dial(listen), credentials.name
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


def _to_dial(listen: str) -> str:
    """Returns the address at which to reach a process on this machine that listens on ``listen``.
    Raises InputError.
    """
    host, port = split_address(listen)
    host = _ANY_ADDRESS.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
