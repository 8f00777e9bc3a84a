"""Reports to the server that a party has failed before it joined, so that the other parties are
told why it is missing.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import grpc

from vfl_common.errors import VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.link import PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.ask import ask
from vfl_common.rpc.channel import connect
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.messages import Joining
from vfl_common.rpc.uplink import SERVICE

# The time limit of each of three answers of the server. It is short, because a person waits for the
# error meanwhile.
_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


def report_failure(
    address: str, keyring: Keyring, server: str, joining: Joining, error: Exception
) -> None:
    """Reports to the server why a party does not join. Only the error's code and public text are
    sent.

    Nothing is sent to a server of an older release, because it would end the run on such a message.
    Errors of the connection are only logged.

    Args:
        address: The address of the server.
        server: The name of the server.
        joining: The facts with which the party would join.
    """
    try:
        _send_failure(address, keyring, server, replace(joining, oldest=PROTOCOL), error)
    except (VflError, grpc.RpcError) as why:
        log.info(
            "%s could not be told why this party fails: %s", server, why, extra={"event": "untold"}
        )


def _send_failure(
    address: str, keyring: Keyring, server: str, joining: Joining, error: Exception
) -> None:
    if not ask(address, keyring.current(), server, SERVICE, joining, _PATIENCE_S):
        return
    channel = connect(address, keyring.current(), server, _PATIENCE_S)
    if isinstance(channel, VflError):
        raise channel
    message = control_pb2.PartyMessage(abort=to_failure(error))
    with channel:
        session = channel.stream_stream(f"/{SERVICE}/Session")
        # The loop waits until the server has ended the session.
        for _ in session(iter([message.SerializeToString()]), timeout=_PATIENCE_S):
            pass
