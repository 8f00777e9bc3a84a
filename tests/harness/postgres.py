"""A PostgreSQL server of a test's own, on a socket in a temporary folder and a free port of
loopback.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.waiting import wait_until

_DEBIAN = "/usr/lib/postgresql"
_START_S, _STOP_S = 60, 30
_ENVIRONMENT = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def programs() -> Path | None:
    """Returns the folder of the newest server that is installed; None if there is none, or nobody
    to run it as.
    """
    found = sorted(Path(_DEBIAN).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    every = [*found, *([Path(on_path).resolve()] if on_path else [])]
    return every[-1].parent if every and (os.getuid() != 0 or _account() is not None) else None


@dataclass(frozen=True)
class Postgres:
    """A running server. Users on the socket need no password, those on loopback do.

    Args:
        programs: the folder of the server's programs.
        folder: of its socket.
        port: of loopback, also in the socket's name.
    """

    programs: Path
    folder: Path
    port: int

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """Returns the URL of a database, on the socket."""
        return f"postgresql://{user}@/{database}?host={self.folder}&port={self.port}"

    def run(self, *statements: str) -> str:
        """Runs statements; returns what the last one prints, without headings."""
        command = [f"{self.programs}/psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", self.url()]
        given = [part for statement in statements for part in ("-c", statement)]
        done = subprocess.run(
            [*command, *given], capture_output=True, text=True, check=True, env=_ENVIRONMENT
        )
        return done.stdout.strip()


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Makes a cluster in a temporary folder, and runs its server while the context is open."""
    where = programs()
    assert where is not None
    account = _account() if os.getuid() == 0 else None
    # Not pytest's: the name of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        data = folder / "data"
        own: dict[str, Any] = {"cwd": folder, "env": _ENVIRONMENT}
        if account is not None:
            own |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        making = [f"{where}/initdb", "-D", f"{data}", "-U", "postgres", "--no-sync", "-E", "UTF8"]
        making += ["--auth-local=trust", "--auth-host=scram-sha-256"]
        subprocess.run(making, check=True, capture_output=True, timeout=_START_S, **own)
        port = _free_port()
        options = {
            "unix_socket_directories": folder,
            "port": port,
            "listen_addresses": "127.0.0.1",
            "fsync": "off",
        }
        # A stream that a test opens and never reads keeps its connection until it is collected as
        # garbage, which the tests do rarely.
        options |= {"max_connections": 100, "shared_buffers": "16MB"}
        server = [
            f"{where}/postgres",
            "-D",
            f"{data}",
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(server, stdout=log, stderr=log, **own)
        try:
            found = Postgres(where, folder, port)
            wait_until(lambda: process.poll() is not None or _ready(found), timeout_s=_START_S)
            assert process.poll() is None, (folder / "log").read_text()
            yield found
        finally:
            # At once, and without a checkpoint.
            process.send_signal(signal.SIGQUIT)
            process.wait(_STOP_S)
    finally:
        shutil.rmtree(folder)


def _ready(server: Postgres) -> bool:
    asking = [
        f"{server.programs}/pg_isready",
        "-q",
        "-h",
        f"{server.folder}",
        "-p",
        f"{server.port}",
    ]
    return subprocess.run(asking, check=False, env=_ENVIRONMENT).returncode == 0


def _account() -> pwd.struct_passwd | None:
    """Returns somebody without rights: a server refuses to run as root."""
    accounts = {each.pw_name: each for each in pwd.getpwall()}
    return next((accounts[name] for name in ("postgres", "nobody") if name in accounts), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
