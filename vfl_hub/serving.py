"""Serves a node's REST API while the node is connected to the hub."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from pathlib import Path

import uvicorn

from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import load_or_create_secret, raise_file_limit, write_atomic
from vfl_common.process.logs import Console, log_to
from vfl_common.text import host_and_port, to_json
from vfl_hub.api import make_api
from vfl_hub.console import Sessions
from vfl_hub.node import Node
from vfl_hub.settings import NodeFile

log = logging.getLogger(__name__)
_CLEAN_S, _AGAIN_S = 3600.0, 30.0


def serve_node(path: Path, settings: NodeFile, console: Console, *, pages: bool) -> None:
    """Serves until a signal arrives.

    ``pages``: Whether to serve the console. Raises InputError if the address cannot be used.
    """
    raise_file_limit()
    node = Node(path, settings, console)
    log_to(node.folder / "log.jsonl", party=settings.name)
    token = load_or_create_secret(node.folder / "api.token", secrets.token_hex(32).encode())
    host, port = host_and_port(settings.listen)
    sessions = Sessions(token.decode(), settings.console) if pages else None
    api = make_api(node, token.decode(), sessions)
    server = uvicorn.Server(
        uvicorn.Config(api, host=host, port=port, log_config=None, access_log=False)
    )
    thread = threading.Thread(target=server.run, name="api", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    if not server.started:
        raise InputError(
            Code.ADDRESS_IN_USE, f"{settings.listen}: cannot be listened on. Choose another port."
        )
    (sock, *_) = server.servers[0].sockets
    # People on this machine reach a node that listens at all addresses.
    near = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - it compares
    url = f"http://{near}:{sock.getsockname()[1]}"
    write_atomic(node.folder / "api.json", to_json({"url": url}))
    facts = {"console": f"{url}/console/login?link={sessions.link}"} if sessions else {}
    console.emit("ready", name=settings.name, address=url.removeprefix("http://"), **facts)
    worker = threading.Thread(target=node.run, name="hub", daemon=True)
    worker.start()
    try:
        cleaned_s = -_CLEAN_S
        while worker.is_alive():
            if time.monotonic() - cleaned_s > _CLEAN_S:
                cleaned_s = time.monotonic()
                for do in (node.clean, node.renew):
                    try:
                        do()
                    except (VflError, OSError) as error:
                        log.warning("%s", error)
                        # For example the hub was busy.
                        cleaned_s = time.monotonic() - _CLEAN_S + _AGAIN_S
                    except Exception:
                        log.exception("the node goes on")
            worker.join(1.0)
    finally:
        node.stopped.set()
        server.should_exit = True
        worker.join(30.0)
        thread.join(5.0)
