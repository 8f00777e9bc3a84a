"""Tells the server that a party has failed before it joined, so that the others read why they wait
for it.
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

# For each of three answers of the server. A person waits for the error meanwhile.
_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


def tell_unable(
    address: str, keyring: Keyring, server: str, joining: Joining, error: Exception
) -> None:
    """Tells the server why a party does not join; only the code and the public text cross.

    A server that cannot be reached hears nothing. Nor does one of an older release, which would end
    the run: it does not speak this protocol.

    Args:
        address: the server's.
        server: the server's name.
        joining: what the party would say when it joins.
    """
    try:
        _tell(address, keyring, server, replace(joining, oldest=PROTOCOL), error)
    except (VflError, grpc.RpcError) as why:
        text = "%s does not hear why this party fails: %s"
        log.info(text, server, why, extra={"event": "untold"})


def _tell(address: str, keyring: Keyring, server: str, joining: Joining, error: Exception) -> None:
    if not ask(address, keyring.current(), server, SERVICE, joining, _PATIENCE_S):
        return
    channel = connect(address, keyring.current(), server, _PATIENCE_S)
    if isinstance(channel, VflError):
        raise channel
    message = control_pb2.PartyMessage(abort=to_failure(error))
    with channel:
        session = channel.stream_stream(f"/{SERVICE}/Session")
        # Until the server has ended it.
        for _ in session(iter([message.SerializeToString()]), timeout=_PATIENCE_S):
            pass
