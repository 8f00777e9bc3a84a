"""The file of a node: its identity, the hub, its data sets and its limits."""

from __future__ import annotations

from datetime import datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from vfl_common.config.base import Section, match_pattern, parse, read_toml
from vfl_common.config.party import Address, PartyFile, TlsSettings
from vfl_common.config.policy import Pin, PolicySettings
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError
from vfl_hub.documents import DataName
from vfl_hub.streams import HubAddress


def _check_hours(text: str) -> str:
    """HH:MM-HH:MM"""
    for part in text.split("-"):
        time.fromisoformat(part)
    if text.count("-") != 1:
        raise ValueError("write hours as 20:00-06:00")
    return text


Hours = Annotated[str, AfterValidator(_check_hours)]
# Keys of a party file that the node sets itself.
OWN_KEYS = ("name", "recipe", "server", "active", "listen", "advertise", "out", "tls", "pins")


class NamedData(Section):
    """A named data set."""

    party: dict[str, Any]
    """The keys of a party file: ``data``, ``policy``, ``device``, ``threads`` and others. The node
    sets the names, addresses, keys and folders.
    """
    description: str = ""
    """What the members of the collaboration may know about it."""
    approval: Literal["each", "automatic"] = "each"
    """``each``: a person approves each proposal. ``automatic``: the node approves the proposals of
    ``proposers``, and the party's policy decides what may leave.
    """
    proposers: tuple[Name, ...] = ()
    """With automatic: the members whose proposals are approved."""


class Limits(Section):
    """What runs may use."""

    max_runs: PositiveInt = 1
    """The maximum number of runs at a time."""
    hours: Hours | None = None
    """The hours of the day in which runs begin, in local time: ``20:00-06:00``. Default: all."""
    warm_minutes: Annotated[int, Field(ge=0)] = 10
    """The minutes for which a process with the imported libraries, of 350 MiB, waits for the next
    run, which then begins 2 s earlier. 0: never.
    """
    keep_days: Annotated[int, Field(ge=1)] | None = None
    """The number of days after which the folder of an ended run is removed. Default: never."""

    def count_slots(self, now: datetime) -> int:
        """Returns the number of runs that may go on at this time."""
        if self.hours is None:
            return self.max_runs
        begin, end = (time.fromisoformat(part) for part in self.hours.split("-"))
        at = now.time()
        is_open = begin <= at < end if begin < end else at >= begin or at < end
        return self.max_runs if is_open else 0


class DirectStreams(Section):
    """Streams between members without the hub."""

    listen: Address | None = None
    """The address at which other members' nodes reach this one. Default: they use the hub."""
    advertise: Address | None = None
    """The address that other members dial, if it is not ``listen``."""
    dial: tuple[Name, ...] = ()
    """The members whose address this node dials. It uses the hub if they cannot be reached."""

    @model_validator(mode="after")
    def _check_address(self) -> DirectStreams:
        host = self.listen.rpartition(":")[0] if self.listen else ""
        if host in ("0.0.0.0", "[::]", "::") and not self.advertise:  # noqa: S104 - it compares
            raise ValueError("advertise is missing. Set the address that other members dial")
        return self


class Launch(Section):
    """How the programs of runs are started on other machines, for example by Slurm."""

    command: tuple[str, ...]
    """The beginning of the command line: ``["srun", "--gres=gpu:1"]``. It must pass on signals and
    standard output, and the folders must be shared.
    """
    host: Annotated[str, Field(min_length=1)]
    """The name or address of this machine, at which the programs reach the node."""


Role = Literal["viewer", "approver", "owner"]


class ConsoleSettings(Section):
    """People who reach the console through a proxy that signs them in, for example with OIDC."""

    roles: dict[str, Role] = Field(default_factory=dict)
    """The roles of people by name, as ``proxy_header`` has it; ``*`` is anybody else. A ``viewer``
    reads. An ``approver`` also approves, denies and stops. An ``owner`` also trusts new keys.
    """
    proxy_header: Annotated[str, match_pattern(r"[A-Za-z0-9-]+", "the name of a header")] = (
        "X-Forwarded-Email"
    )
    """The header in which the proxy sends the name of a person."""
    proxy_secret: str | None = None
    """The file with a secret of at least 32 characters, which the proxy sends in the header
    ``X-VFL-Proxy-Secret``. ``proxy_header`` is ignored in requests without it.
    """

    @model_validator(mode="after")
    def _check_secret(self) -> ConsoleSettings:
        if bool(self.roles) != bool(self.proxy_secret):
            raise ValueError("roles and proxy_secret need each other. Set both or none")
        return self


class NodeFile(Section):
    """The file of a node. Relative paths start at the file's own folder."""

    name: Name
    """This member's name."""
    hub: Annotated[str, match_pattern(r"https?://\S+", "a URL as https://host:port")]
    """The URL of the hub."""
    hub_name: Name = "server"
    """The name in the hub's certificate, which is the server's name in recipes."""
    hub_pin: Pin
    """The pin of the hub's key, as in the token of the invitation."""
    tls: TlsSettings
    """The federation's CA, and this member's certificate and key."""
    gateway: bool = False
    """Whether a gateway with a public certificate ends TLS in front of the hub."""
    plain_tunnels: bool = True
    """Whether tunnels begin without TLS. What they carry is encrypted from party to party, so TLS
    around it only helps where a proxy or a gateway requires it; ``gateway`` implies it.
    """
    proxy: Annotated[str, match_pattern(r"http://\S+", "a URL as http://host:port")] | None = None
    """The HTTP proxy to the hub, ``http://user:password@host:port``."""
    folder: str = "node"
    """The folder of this node's state and runs."""
    listen: Address = "127.0.0.1:0"
    """The address of the REST API for this member's own people."""
    data: dict[DataName, NamedData] = Field(default_factory=dict)
    """The data sets by name."""
    limits: Limits = Limits()
    """What runs may use."""
    direct: DirectStreams = DirectStreams()
    """Streams between members without the hub."""
    launch: Launch | None = None
    """How programs are started on other machines. Default: they run on this one."""
    console: ConsoleSettings = ConsoleSettings()
    """Who may use the console through a proxy."""

    def make_address(self) -> HubAddress:
        """Returns how to reach the hub."""
        return HubAddress(
            self.hub.rstrip("/"),
            "" if self.gateway else self.hub_name,
            Path(self.tls.ca),
            self.proxy or "",
            plain_tunnels=self.plain_tunnels and not self.gateway,
            pin="" if self.gateway else self.hub_pin,
        )


def load_node(path: Path) -> NodeFile:
    """Reads the file of a node, with absolute paths. Raises InputError if it is invalid."""
    node = parse(NodeFile, read_toml(path), str(path))
    here = path.absolute().parent
    tls = {key: str(here / value) for key, value in node.tls if value is not None}
    secret = node.console.proxy_secret
    console = node.console.model_copy(update={"proxy_secret": secret and str(here / secret)})
    node = node.model_copy(
        update={
            "tls": TlsSettings.model_validate(tls),
            "folder": str(here / node.folder),
            "console": console,
        }
    )
    for name in node.data:
        where = f"{path}: data.{name}.party"
        for key in OWN_KEYS:
            if key in node.data[name].party:
                raise InputError(
                    Code.CONFIG_INVALID, f"{where}.{key}: is set by the node. Remove it."
                )
        parse(PartyFile, make_party_tables(node, name), where)
        if node.data[name].approval == "automatic" and needs_grants(node, name):
            raise InputError(
                Code.CONFIG_INVALID,
                f'{path}: data.{name}.approval: must be "each", because the policy requires the '
                'approval of a person (got "automatic"). Change one of them.',
            )
    return node


def make_party_tables(node: NodeFile, data: str, **own: Any) -> dict[str, Any]:
    """Returns the tables of a party file for a data set. ``own``: Keys of the run."""
    placeholders = {"recipe": "recipe.toml", "server": "127.0.0.1:1"}
    tls = {key: value for key, value in node.tls if value is not None}
    return {"name": node.name, **placeholders, "tls": tls, **own, **node.data[data].party}


def needs_grants(node: NodeFile, data: str) -> bool:
    """Returns whether the party's policy requires a grant for each run."""
    file = parse(PartyFile, make_party_tables(node, data), f"data.{data}.party")
    return isinstance(file.policy, PolicySettings) and file.policy.approval == "each"
