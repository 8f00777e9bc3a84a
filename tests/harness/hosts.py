"""Separate hosts on one machine (Linux, root): network namespaces on a bridge, each with an address
and a name.

    with Hosts(tmp_path, {"fed": "fed.example.org", …}) as hosts:
        hosts.run("fed", "vfl certs ca")
        program = hosts.start("fed", "vfl-server run recipe.toml")

Each has its own home, in which its commands run; only ``scp`` moves something from one to another.
The programs of a federation are forked as in ``federation``, and enter their host then (see
``preloaded``); others are started afresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.federation import BIN, Program, toml
from tests.harness.sharing import FRESH
from vfl.certs.authority import create_authority, issue
from vfl.launcher.child import PROGRAMS

COMMAND_S = 180.0
NAMES = {"fed": "fed.example.org", "bank": "bank.example.org", "hospital": "hospital.example.org"}
# {process: its host}.
HOSTS_OF = {"server": "fed", "bank": "bank", "hospital": "hospital"}


def missing() -> str:
    """Returns why such hosts cannot be made here; '' if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs the program ip (iproute2)"
    name = f"vfl-{os.getpid()}-try"
    tried = subprocess.run(
        ["ip", "netns", "add", name],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=10)  # noqa: S607
    return ""


class Hosts:
    """Makes the hosts and removes them at the end.

    ``names``: {host: its name for the others}. ``path``: another PYTHONPATH for the federation's
    programs.
    """

    def __init__(self, folder: Path, names: Mapping[str, str], path: str = "") -> None:
        self.folder, self.names, self.path = folder, dict(names), path
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(names, 1)}
        self.programs: list[tuple[str, Program]] = []
        self._made: list[str] = []

    def space(self, host: str) -> str:
        """Returns the namespace of a host."""
        return f"vfl-{os.getpid()}-{host}"

    def home(self, host: str) -> Path:
        """Returns the folder in which a host's commands run."""
        return self.folder / host / "vfl"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        # The bridge has its own namespace too, so that the machine itself shows nothing.
        switch = self.space("switch")
        self._ip("netns", "add", switch)
        self._made.append(switch)
        self._in("switch", "ip", "link", "add", "bridge", "type", "bridge")
        self._in("switch", "ip", "link", "set", "bridge", "up")
        known = "".join(f"{self.addresses[host]} {name}\n" for host, name in self.names.items())
        for number, host in enumerate(self.names):
            space = self.space(host)
            self._ip("netns", "add", space)
            self._made.append(space)
            cable = f"port{number}"
            self._in(
                "switch",
                "ip",
                "link",
                "add",
                cable,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            self._in("switch", "ip", "link", "set", cable, "master", "bridge", "up")
            self._in(host, "ip", "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            self._in(host, "ip", "link", "set", "eth0", "up")
            self._in(host, "ip", "link", "set", "lo", "up")
            # `ip netns exec` shows it as /etc.
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True)
            # The machine's own name has an address, as torch wants it.
            own = f"{self.addresses[host]} {socket.gethostname()}\n"
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{own}{known}")
            self.home(host).mkdir(parents=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, program in self.programs:
            program.close()
        for space in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", space)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)

    def run(self, host: str, line: str) -> None:
        """Runs one command to its end. Fails if the command fails."""
        if line.startswith("scp "):
            self._copy(host, *shlex.split(line)[1:])
            return
        program = self.start(host, line)
        code = program.wait(COMMAND_S)
        assert code == 0, f"{host}$ {line}\n{program.seen()}{program.stderr}"

    def start(self, host: str, line: str) -> Program:
        """Starts a command that keeps running."""
        words = self._words(host, line)
        fresh = FRESH or words[0] not in (*PROGRAMS, "torchrun")
        program = Program(
            f"{host}-{len(self.programs)}",
            ["ip", "netns", "exec", self.space(host), *words],
            self.home(host),
            fresh=fresh,
            environment=self._environment(host) if fresh or self.path else None,
        )
        self.programs.append((host, program))
        return program

    @contextlib.contextmanager
    def enter(self, host: str) -> Iterator[None]:
        """Lets this thread, and processes that it starts, use the network of a host."""
        with (
            Path("/proc/thread-self/ns/net").open() as before,
            Path("/run/netns", self.space(host)).open() as space,
        ):
            _set_network(space.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())

    def close_inwards(self, host: str, other: str, port: int) -> None:
        """Lets a host send packets only to one TCP port of another host, so that it can dial out,
        and nobody can connect to it: no answer would leave. Not every kernel has packet filters.
        """
        address, table = self.addresses[other], str(port)
        space, device = ("-n", self.space(host)), ("dev", "eth0")
        self._ip(*space, "route", "add", address, *device, "table", table)
        port_rule = ("to", address, "ipproto", "tcp", "dport", str(port), "lookup", table)
        self._ip(*space, "rule", "add", *port_rule)
        self._ip(*space, "route", "del", "10.77.0.0/24", *device)

    def list_listening(self, host: str) -> set[str]:
        """Returns the addresses at which processes of a host listen for TCP connections."""
        lines = self._in(host, "ss", "--no-header", "--listening", "--tcp", "--numeric")
        names = [line.split()[3].rpartition(":")[0].strip("[]") for line in lines.splitlines()]
        # gRPC listens at IPv4 addresses with sockets of IPv6.
        return {name.removeprefix("::ffff:") for name in names}

    def kill(self, host: str) -> None:
        """Kills all processes on a host at once, as a power cut would."""
        for pid in self._ip("netns", "pids", self.space(host)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def counters(self, host: str) -> tuple[int, int]:
        """Returns (bytes sent, bytes received) on the host's interface so far."""
        lines = self._in(host, "cat", "/proc/net/dev").splitlines()
        (fields,) = [
            line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")
        ]
        return int(fields[8]), int(fields[0])

    def _copy(self, host: str, source: str, target: str) -> None:
        """Copies a file as ``scp FILE user@name:vfl/PATH`` would."""
        where, _, path = target.partition(":")
        (other,) = [each for each, name in self.names.items() if name == where.partition("@")[2]]
        wanted = self.home(other).parent / path
        wanted.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.home(host) / source, wanted)

    def _words(self, host: str, line: str) -> list[str]:
        words: list[str] = []
        for word in shlex.split(line):
            found = sorted(self.home(host).glob(word)) if "*" in word else []
            words += [str(path.relative_to(self.home(host))) for path in found] or [word]
        return words

    def _environment(self, host: str) -> dict[str, str]:
        home = str(self.home(host).parent)
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        kept = {key: os.environ[key] for key in ("PYTHONPATH", "LANG") if key in os.environ}
        kept |= {"PYTHONPATH": self.path} if self.path else {}
        return kept | {"HOME": home, "PATH": path, "OMP_NUM_THREADS": "1"}

    def _in(self, host: str, *command: str) -> str:
        return self._ip("netns", "exec", self.space(host), *command)

    @staticmethod
    def _ip(*args: str) -> str:
        done = subprocess.run(["ip", *args], capture_output=True, text=True, check=True, timeout=20)  # noqa: S607
        return done.stdout


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def halves_of_digits(hosts: Hosts, recipe: dict[str, Any]) -> None:
    """Writes all that a federation of ``NAMES`` needs to its hosts: bank and hospital hold a half
    of each digit.
    """
    authority = hosts.folder / "ca"
    create_authority(authority, recipe["name"])
    for name, host in HOSTS_OF.items():
        issue(authority, name, out=hosts.home(host) / "certs")
        shutil.copy(authority / "ca.pem", hosts.home(host) / "certs")
        (hosts.home(host) / "recipe.toml").write_text(toml(recipe))
    for part, name in enumerate(("bank", "hospital")):
        data = {"source": "sklearn:digits", "view": {"scheme": "halves", "part": part, "parts": 2}}
        file = {
            "name": name,
            "recipe": "recipe.toml",
            "server": f"{NAMES['fed']}:7000",
            "tls": {
                "ca": "certs/ca.pem",
                "certificate": f"certs/{name}.pem",
                "key": f"certs/{name}.key",
            },
            "data": data | ({"label": "target"} if name == "bank" else {}),
        }
        if name == "bank":
            file |= {"listen": "0.0.0.0:7001", "advertise": f"{NAMES['bank']}:7001"}
        (hosts.home(name) / f"{name}.toml").write_text(toml(file))
