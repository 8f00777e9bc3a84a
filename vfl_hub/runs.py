"""The run of a party at its node: its process, and the streams to its peers."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from vfl.simulation.federation import to_toml
from vfl_common.files import write_atomic
from vfl_common.text import host_and_port
from vfl_hub.children import Child, is_finished
from vfl_hub.documents import ReadProposal
from vfl_hub.front import SERVER
from vfl_hub.streams import SWITCHED, join_streams, open_direct

if TYPE_CHECKING:
    from vfl_hub.node import Node

log = logging.getLogger(__name__)
_TUNNEL_S, _CONNECT_S, _DIRECT_S, _POLL_S, _RETRY_S = 30.0, 10.0, 3.0, 0.02, 0.1
# Seconds for which the hub is used after a direct way has failed.
_AGAIN_S = 60.0


class OwnRun:
    """A running run: the party's process, and the local addresses of its peers.

    Args:
        token: The token of the hub for tunnels of this run.
        direct: The address at which the active party's node is reached without the hub, or ''.
    """

    def __init__(self, node: Node, read: ReadProposal, token: str, direct: str) -> None:
        self.id, self.token = read.id, token
        self.address = ""
        self.last: dict[str, Any] = {}
        self._node = node
        settings, name = node.settings, node.settings.name
        folder = node.folder / "runs" / read.id[:16]
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        write_atomic(folder / "recipe.toml", to_toml(read.proposal.recipe))
        active, data = read.recipe.active.name, read.proposal.data[name]
        with contextlib.ExitStack() as forwarders:
            server = _Forwarder(node, self, SERVER)
            forwarders.callback(server.close)
            addresses = {"server": server.address}
            if name != active:
                peer = _Forwarder(node, self, active, direct)
                forwarders.callback(peer.close)
                addresses["active"] = peer.address
            elif settings.launch is not None:
                # The other parties use tunnels instead of the advertised address.
                addresses |= {"listen": "0.0.0.0:0", "advertise": f"{settings.launch.host}:1"}
            self._file = node.write_party_file(read, data, folder, addresses)
            self._forwarders = forwarders.pop_all()
        self.child = Child(
            name,
            ["vfl-party", "run", str(self._file), "--wait", "60"],
            folder,
            on_event=self._hear,
            on_change=node.report,
            is_finished=partial(is_finished, folder, read.id[:16], name),
            threads=int(settings.data[data].party.get("threads", 1)),
            starter=node.starter,
        )

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ready":
            host, port = host_and_port(str(event["address"]))
            # A program that listens at all its addresses says which one the node reaches.
            self.address = f"{event.get('host', host)}:{port}"
        self.last = {**event, "at": time.time()}

    def accept(self, number: str) -> None:
        """Opens this end of a tunnel to the party's process, which may just be starting. Any
        thread may call it.
        """
        self._wait_for_party()
        try:
            tunnel = self._node.address.open_tunnel(
                f"/tunnel/accept/{number}", self.token, _TUNNEL_S
            )
        except OSError as error:
            log.info("a tunnel cannot be opened: %s", error)
            return
        self.join(tunnel)

    def _wait_for_party(self) -> None:
        give_up_s = time.monotonic() + _CONNECT_S
        while not self.address and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)

    def join(self, tunnel: socket.socket) -> None:
        """Joins a tunnel and the party's process."""
        self._wait_for_party()
        try:
            party = socket.create_connection(host_and_port(self.address or "127.0.0.1:1"), 1.0)
        except OSError:
            tunnel.close()
            return
        party.settimeout(None)
        party.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        join_streams(tunnel, party)

    def stop(self) -> None:
        """Ends the process and closes the local addresses."""
        self.child.stop()
        self._forwarders.close()
        self._file.unlink(missing_ok=True)


class DirectTunnels:
    """Serves the tunnels of other members' nodes that do not use the hub. The id of a run is the
    secret that a caller has to know; then the programs at both ends verify each other's keys.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def serve(self, path: str, token: str, sock: socket.socket) -> None:  # noqa: ARG002
        """Serves ``/tunnel/direct/RUN``. Returns when the tunnel has ended."""
        run = self._node.find_run(path.removeprefix("/tunnel/direct/"))
        if run is None:
            sock.close()
            return
        # The party's process may just be starting, for which the caller does not wait.
        sock.sendall(SWITCHED)
        run.join(sock)


class _Forwarder:
    """Listens on this machine, and forwards each connection through a tunnel to a peer.

    ``direct``: The peer's address that is tried first, or ''.
    """

    def __init__(self, node: Node, run: OwnRun, target: str, direct: str = "") -> None:
        self._node, self._run, self._target, self._direct = node, run, target, direct
        self._is_closed, self._direct_again_s = False, 0.0
        launch = node.settings.launch
        # Programs on other machines come from outside.
        self._socket = socket.create_server(("127.0.0.1" if launch is None else "", 0))
        host = "127.0.0.1" if launch is None else launch.host
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name=f"to {target}", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                # There may be no descriptor left.
                time.sleep(_RETRY_S)
                continue
            try:
                threading.Thread(target=self._forward, args=(sock,), daemon=True).start()
            except RuntimeError:
                # There are too many threads.
                sock.close()
                time.sleep(_RETRY_S)

    def _forward(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            tunnel = self._open_direct() or self._node.address.open_tunnel(
                f"/tunnel/dial/{self._run.id}/{self._node.settings.name}/{self._target}",
                self._run.token,
                _TUNNEL_S,
            )
        except OSError:
            # The program at this end tries again.
            sock.close()
            return
        join_streams(sock, tunnel)

    def _open_direct(self) -> socket.socket | None:
        """Returns a tunnel without the hub; None if the peer cannot be reached so."""
        if not self._direct or time.monotonic() < self._direct_again_s:
            return None
        try:
            return open_direct(self._direct, f"/tunnel/direct/{self._run.id}", _DIRECT_S)
        except (OSError, ValueError) as error:
            log.warning(
                "%s: cannot be reached at %s (%s). The hub is used instead.",
                self._target,
                self._direct,
                error,
            )
            self._direct_again_s = time.monotonic() + _AGAIN_S
            return None
