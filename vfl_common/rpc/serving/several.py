"""The active party's side if it serves several runs: passes each stream to the service of the run
that the stream names.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.channel import CallLimit, Context, Handler, get_caller_name, stream_handler
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService
from vfl_common.text import list_names

log = logging.getLogger(__name__)


class SeveralRuns:
    """Serves the streams of several runs. Runs may be added and removed while it serves.

    Args:
        keyring: The credentials, with the members of all runs.
        parties: The passive parties of all runs.
        max_runs: The maximum number of runs at the same time.
    """

    def __init__(self, keyring: Keyring, parties: Collection[str], max_runs: int) -> None:
        self._keyring, self._parties = keyring, frozenset(parties)
        self._services: dict[str, ServingService] = {}
        # The parties whose refusal was logged.
        self._refused = set[str]()
        self._places = CallLimit(MAX_STREAMS * max_runs, "streams")

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        return stream_handler(SERVICE, Attend=self._attend)

    def add(self, run_id: str, service: ServingService) -> None:
        """Passes the streams of a run to ``service`` from now on."""
        self._services = {**self._services, run_id: service}
        self._refused.clear()

    def remove(self, run_id: str) -> None:
        """Refuses the streams of a run from now on."""
        self._services = {run: s for run, s in self._services.items() if run != run_id}

    def close(self) -> None:
        """Ends all streams."""
        for service in self._services.values():
            service.close()

    def _attend(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            party = get_caller_name(context, self._keyring)
            service = next(iter(self._services.values()))
            if party not in self._parties:
                # Any service refuses a stranger and sends the reason.
                yield from service.attend(requests, context)
                return
            with self._places.hold(party):
                first = next(requests, b"")
                run_id = _read_run_id(first)
                # Any service refuses a stream that names no run and sends the reason.
                named_service = self._services.get(run_id) if run_id else service
                if named_service is None:
                    raise self._refuse(party)
                yield from named_service.attend(itertools.chain((first,), requests), context)
        except grpc.RpcError:
            # The stream has ended before its first message.
            return
        except PeerError as error:
            yield serving_pb2.FromActive(failure=to_failure(error)).SerializeToString()

    def _refuse(self, party: str) -> PeerError:
        """Returns the refusal of a run that is not served here. It is logged only once for each
        party, because the party repeats its attempt.
        """
        error = PeerError(
            Code.RECIPE_DIFFERS,
            f"{party} serves another run than {list_names([*self._services])}. Give both parties "
            "the same runs with --run.",
            party=party,
        )
        if party not in self._refused:
            self._refused.add(party)
            log.warning("%s", error, extra={"event": "refused"})
        return error


def _read_run_id(data: bytes) -> str:
    try:
        return serving_pb2.FromParty.FromString(data).present.run_id
    except DecodeError:
        return ""
