"""The active party's side, if it serves several runs: each stream goes to the run that it names."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.channel import Context, Handler, Places, caller, stream_handler
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService

log = logging.getLogger(__name__)


class SeveralRuns:
    """Serves the streams of several runs; runs may be added and removed meanwhile.

    Args:
        keyring: whose members are those of all runs.
        parties: the passive parties of all runs.
        most: runs at once.
    """

    def __init__(self, keyring: Keyring, parties: Collection[str], most: int) -> None:
        self._keyring, self._parties = keyring, frozenset(parties)
        self._services: dict[str, ServingService] = {}
        self._places = Places(MAX_STREAMS * most, "streams")

    def handler(self) -> Handler:
        return stream_handler(SERVICE, Attend=self._attend)

    def add(self, run_id: str, service: ServingService) -> None:
        """Has a service take the streams of its run."""
        self._services = {**self._services, run_id: service}

    def remove(self, run_id: str) -> None:
        """Has the streams of a run refused from now on."""
        self._services = {each: of for each, of in self._services.items() if each != run_id}

    def close(self) -> None:
        """Ends all streams."""
        for each in self._services.values():
            each.close()

    def _attend(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            party = caller(context, self._keyring)
            # It says why it refuses a stranger, and a stream that names no run, or another one.
            service = next(iter(self._services.values()))
            if party not in self._parties:
                yield from service.attend(requests, context)
                return
            with self._places.taken(party):
                first = next(requests, b"")
                service = self._services.get(_run(first), service)
                yield from service.attend(itertools.chain((first,), requests), context)
        except grpc.RpcError:
            # The stream has ended before its first message.
            return
        except PeerError as error:
            log.warning("%s", error, extra={"event": "refused"})
            yield serving_pb2.FromActive(failure=to_failure(error)).SerializeToString()


def _run(data: bytes) -> str:
    try:
        return serving_pb2.FromParty.FromString(data).present.run_id
    except DecodeError:
        return ""
