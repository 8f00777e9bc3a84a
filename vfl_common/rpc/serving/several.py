"""The active party's side, if it serves several runs: each stream goes to the run that it names."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.channel import Context, Handler, Places, caller, stream_handler
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService
from vfl_common.text import listed

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
        # Parties whose refusal was logged.
        self._told = set[str]()
        self._places = Places(MAX_STREAMS * most, "streams")

    def handler(self) -> Handler:
        return stream_handler(SERVICE, Attend=self._attend)

    def add(self, run_id: str, service: ServingService) -> None:
        """Has a service take the streams of its run."""
        self._services = {**self._services, run_id: service}
        self._told.clear()

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
            service = next(iter(self._services.values()))
            if party not in self._parties:
                # It says why it refuses a stranger.
                yield from service.attend(requests, context)
                return
            with self._places.taken(party):
                first = next(requests, b"")
                run_id = _run(first)
                # It says what is wrong with a stream that names no run.
                found = self._services.get(run_id) if run_id else service
                if found is None:
                    raise self._other(party)
                yield from found.attend(itertools.chain((first,), requests), context)
        except grpc.RpcError:
            # The stream has ended before its first message.
            return
        except PeerError as error:
            yield serving_pb2.FromActive(failure=to_failure(error)).SerializeToString()

    def _other(self, party: str) -> PeerError:
        """Returns the refusal of a run that is not served here; it is logged once, since the party
        asks again and again whether it is here by now.
        """
        text = f"{party} serves another run than {listed([*self._services])}"
        error = PeerError(
            Code.RECIPE_DIFFERS, f"{text}; give both the same runs with --run", party=party
        )
        if party not in self._told:
            self._told.add(party)
            log.warning("%s", error, extra={"event": "refused"})
        return error


def _run(data: bytes) -> str:
    try:
        return serving_pb2.FromParty.FromString(data).present.run_id
    except DecodeError:
        return ""
