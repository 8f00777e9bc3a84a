"""Commands of the hub, of the node, and of the node's people."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import click

from vfl_common.config.base import read_tables
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import Console
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import LINE, align_columns, clean, count
from vfl_hub.library import NodeClient
from vfl_hub.schedule import ENDED

_HUB_FOLDER = click.option(
    "--folder",
    default="hub",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Use this folder of the hub.",
)
_DATABASE = click.option(
    "--database",
    default="",
    metavar="URL",
    help="Use this database (SQLAlchemy URL).  [default: hub.sqlite in --folder]",
)
_NAME = click.option(
    "--name", default="server", show_default=True, help="Set the hub's name, the recipes' server."
)
_NODE = click.option(
    "--node",
    default=lambda: os.environ.get("VFL_NODE", "node"),
    show_default="VFL_NODE, or node",
    type=click.Path(path_type=Path),
    help="Ask the node with this folder.",
)
# The exit codes of `vfl submit --wait`.
_EXITS = {"done": 0, "failed": 4, "stopped": 4, "denied": 4, "expired": 3}


@click.command(epilog=EXIT_CODES)
@_HUB_FOLDER
@_NAME
@click.option(
    "--listen",
    default="0.0.0.0:7443",
    show_default=True,
    help="Listen at host:port. Port 0 selects a free port.",
)
@_DATABASE
@click.option(
    "--max-runs",
    default=4,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Run at most this many runs at a time.",
)
@click.option(
    "--behind-gateway",
    is_flag=True,
    help="Accept plain HTTP from a gateway that ends TLS.",
)
def hub(
    folder: Path, name: str, listen: str, database: str, max_runs: int, behind_gateway: bool
) -> None:
    """Run the hub of a standing federation.

    Members connect to it from inside. It keeps proposals, approvals and a queue, starts the server
    of each run, and joins the tunnels of the parties. The first start makes the federation's CA and
    the hub's certificate in FOLDER/certs.

    \b
    Example: vfl-server hub --listen 0.0.0.0:7443
    """
    from vfl.certs import authority
    from vfl_common.config.party import TlsSettings
    from vfl_hub.hub import FederationHub, serve_hub
    from vfl_hub.store import open_store

    certs, console = folder / "certs", Console("vfl-server")
    certs.mkdir(parents=True, exist_ok=True)
    if not (certs / "ca.pem").exists():
        authority.create_authority(certs, "vfl")
    if not (certs / f"{name}.pem").exists():
        authority.issue(certs, name)
    tls = TlsSettings(
        ca=str((certs / "ca.pem").absolute()),
        certificate=str((certs / f"{name}.pem").absolute()),
        key=str((certs / f"{name}.key").absolute()),
    )
    store = open_store(folder, database)
    running = FederationHub(folder.absolute(), store, tls, name, max_runs, console)
    serve_hub(running, listen, behind_gateway=behind_gateway, stopped=threading.Event())


@click.command(epilog=EXIT_CODES)
@click.argument("members", metavar="MEMBER...", nargs=-1, required=True)
@click.option("--url", required=True, help="Set the URL at which members reach the hub.")
@click.option(
    "--collaboration",
    "collaborations",
    multiple=True,
    default=["main"],
    show_default=True,
    help="Add the member to this collaboration. Repeatable.",
)
@_HUB_FOLDER
@_NAME
@_DATABASE
def invite(
    members: tuple[str, ...],
    url: str,
    collaborations: tuple[str, ...],
    folder: Path,
    name: str,
    database: str,
) -> None:
    """Print a token with which MEMBER can join within a day, once.

    Give the token to the member alone. Then admit the member with `vfl-server admit`. With several
    members, each line has a member's name and its token.

    \b
    Example: vfl-server invite shop --url https://hub.example.org:7443
    """
    from vfl_hub import joining
    from vfl_hub.store import open_store

    store = open_store(folder, database)
    for member in members:
        token = joining.invite(store, folder / "certs", url, member, name, collaborations).encode()
        click.echo(f"{member} {token}" if len(members) > 1 else token)


@click.command(epilog=EXIT_CODES)
@click.argument("member")
@click.option("--pin", help="Admit only this key, as `vfl-party join` prints it at the member.")
@_HUB_FOLDER
@_DATABASE
def admit(member: str, pin: str | None, folder: Path, database: str) -> None:
    """Sign the key of an invited MEMBER.

    Ask the member for the pin that `vfl-party join` prints, by telephone. With --pin, the command
    compares it; otherwise it asks you to.

    \b
    Example: vfl-server admit shop --pin sha256:1f3a…
    """
    from vfl_common.identity import pem
    from vfl_hub.hub import sign_member
    from vfl_hub.store import open_store

    store = open_store(folder, database)
    waiting = {
        pem.compute_pin(pem.parse_request(one["request"].encode(), Path(member))): one
        for one in store.list_requests()
        if one["name"] == member and one["until"] > time.time()
    }
    if not waiting:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{member}: has not asked to join. Run `vfl-party join TOKEN` there first.",
        )
    own_pins = ", ".join(waiting)
    if pin is not None and pin not in waiting:
        raise InputError(
            Code.IDENTITY_MISMATCH,
            f"--pin {pin}: is not that of a request (got {own_pins}). Ask {member} again.",
        )
    for own_pin, one in waiting.items():
        if pin is None and not click.confirm(f"{member} has the key {own_pin}. Admit it?"):
            continue
        if pin not in (None, own_pin):
            continue
        sign_member(store, folder / "certs", one)
        click.echo(f"{member} is a member")


@click.command(epilog=EXIT_CODES)
@click.argument("member")
@_HUB_FOLDER
@_DATABASE
def remove(member: str, folder: Path, database: str) -> None:
    """Remove a MEMBER from the federation, and stop its proposals and runs.

    The other members' nodes keep its key. To admit it again, invite it again.

    \b
    Example: vfl-server remove shop
    """
    from vfl_hub.store import open_store

    if not open_store(folder, database).remove_member(member):
        raise InputError(
            Code.CONFIG_INVALID, f"{member}: is not a member. See the names in `vfl members`."
        )
    click.echo(f"{member} is not a member any more")


@click.command("stop-run", epilog=EXIT_CODES)
@click.argument("proposal")
@_HUB_FOLDER
@_DATABASE
def stop_run(proposal: str, folder: Path, database: str) -> None:
    """Stop a PROPOSAL as the operator of the hub, for example if a member has left.

    \b
    Example: vfl-server stop-run 000c201708168820
    """
    from vfl_hub.store import open_store

    store = open_store(folder, database)
    matching = [one for one in store.entries() if proposal and one.id.startswith(proposal)]
    if len(matching) != 1 or matching[0].state in ENDED:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{proposal}: must be the beginning of the id of one proposal that has not ended (got "
            f"{len(matching)} proposals). Correct it.",
        )
    store.move(matching[0].id, "stopped", "stopped by the operator of the hub")
    click.echo(f"{matching[0].id[:12]} is stopped")


@click.command(epilog=EXIT_CODES)
@click.argument("token")
@click.option(
    "--folder",
    default=".",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Write node.toml and certs/ to this folder.",
)
@click.option("--proxy", default="", metavar="URL", help="Reach the hub through this HTTP proxy.")
@click.option("--gateway", is_flag=True, help="Expect a public certificate in front of the hub.")
@click.option(
    "--wait",
    "wait_s",
    default=600.0,
    show_default=True,
    help="Wait at most this many seconds for the operator of the hub.",
)
def join(token: str, folder: Path, proxy: str, gateway: bool, wait_s: float) -> None:
    """Join a federation with the TOKEN of an invitation.

    The key is made here and stays here. The operator of the hub admits it after comparing its pin.

    \b
    Example: vfl-party join eyJ1cmwiOi…
    """
    from vfl_hub import joining

    path = joining.join(
        joining.read_token(token), folder, wait_s, click.echo, proxy=proxy, gateway=gateway
    )
    click.echo(f"{path}: add data sets, then run `vfl-party node {path}`")


@click.command(epilog=EXIT_CODES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--console", "pages", is_flag=True, help="Serve the console's pages, too.")
@click.option("--check", is_flag=True, help="Measure the way to the hub, and end.")
def node(file: Path, pages: bool, check: bool) -> None:
    """Run the node of FILE: stay connected to the hub, and take part in approved runs.

    The node only dials out. It serves a REST API for this member's own people at 127.0.0.1, and
    with --console pages for a browser, where people sign in with the token of FOLDER/api.token.

    \b
    Example: vfl-party node node.toml
    """
    from vfl_hub.settings import load_node

    if check:
        from vfl_common.identity.credentials import BOTH, Members
        from vfl_common.identity.keyring import Keyring
        from vfl_hub.way import measure_way

        settings = load_node(file)
        keyring = Keyring(settings.tls, settings.name, Members(), uses=BOTH)
        for line in measure_way(settings, keyring.current()):
            click.echo(line)
        return
    from vfl_hub.serving import serve_node

    serve_node(file, load_node(file), Console("vfl-party"), pages=pages)


@click.command(epilog=EXIT_CODES)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--data",
    "data",
    multiple=True,
    required=True,
    metavar="PARTY=NAME",
    help="Use this data set of a party. Repeatable.",
)
@click.option("--purpose", default="", help="State a purpose, for the people who approve it.")
@click.option("--days", default=7.0, show_default=True, help="Let it begin within this time.")
@click.option("--approve", "approves", is_flag=True, help="Approve it for this member, too.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the run has ended.")
@_NODE
def submit(
    recipe: Path,
    data: tuple[str, ...],
    purpose: str,
    days: float,
    approves: bool,
    waits: bool,
    node: Path,
) -> int:
    """Propose a run of RECIPE to the federation.

    It begins when all parties have approved it and their nodes have room. With --wait, the exit
    code is 0 if the run is done, 3 if the proposal expires, and 4 if it is denied or fails.

    \b
    Example: vfl submit recipe.toml --data bank=customers --data shop=orders --wait
    """
    names = dict(item.partition("=")[::2] for item in data)
    client = NodeClient(node)
    number = client.submit(
        read_tables(recipe, "recipe"), names, purpose=purpose, days=days, approve=approves
    )
    click.echo(number)
    state = ""
    for row in client.follow(number) if waits else ():
        state = row["state"]
        missing = [one for one in row["parties"] if "approve" not in row["votes"].get(one, {})]
        waiting = f"waits for the approval of {', '.join(missing)}" if state == "open" else ""
        why = row["reason"] or waiting
        click.echo(clean(f"{state}: {why}" if why else state, LINE))
    return _EXITS.get(state, 0)


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON line for each proposal.")
@_NODE
def proposals(as_json: bool, node: Path) -> None:
    """List the proposals of which this member is a party, the newest first."""
    _show(NodeClient(node).proposals(), as_json=as_json)


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON line for each proposal.")
@_NODE
def queue(as_json: bool, node: Path) -> None:
    """List the proposals that wait or run, in their order."""
    rows = [row for row in NodeClient(node).proposals() if row["state"] not in ENDED]
    _show(rows[::-1], as_json=as_json)


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    if not rows:
        click.echo("there are no proposals")
        return
    cells = [
        (
            row["id"][:12],
            clean(row["name"]),
            row["by"],
            ", ".join(f"{party}: {clean(name)}" for party, name in row["data"].items()),
            ", ".join(party for party, kinds in row["votes"].items() if "approve" in kinds) or "–",
            row["state"],
            clean(row["reason"]),
        )
        for row in rows
    ]
    head = ("proposal", "recipe", "by", "data", "approved by", "state", "reason")
    for line in align_columns([head, *cells]):
        click.echo(line.rstrip())


@click.command(epilog=EXIT_CODES)
@click.argument("proposal")
@click.option("--yes", is_flag=True, help="Sign without asking.")
@_NODE
def approve(proposal: str, yes: bool, node: Path) -> None:
    """Approve a PROPOSAL, given by its id or the beginning of it."""
    row = NodeClient(node).ask(f"/v1/proposals/{proposal or '-'}")
    rounds = count(len(row["recipe"].get("phases", [])), "phase")
    click.echo(
        clean(
            f"{row['by']} proposes {row['name']} ({rounds}, digest {row['digest']}) with "
            f"{', '.join(f'{party}: {name}' for party, name in row['data'].items())}"
            + (f", for: {row['purpose']}" if row["purpose"] else ""),
            LINE,
        )
    )
    if not yes:
        click.echo(NodeClient(node).ask(f"/v1/proposals/{proposal}/preview")["text"], nl=False)
    if yes or click.confirm("approve it?"):
        NodeClient(node).ask(f"/v1/proposals/{proposal}/approve", {})
        click.echo(f"{row['id'][:12]} is approved")


@click.command(epilog=EXIT_CODES)
@click.argument("proposal")
@click.option("--why", default="", help="State a reason.")
@_NODE
def deny(proposal: str, why: str, node: Path) -> None:
    """Deny a PROPOSAL permanently."""
    NodeClient(node).deny(proposal, why)
    click.echo(f"{proposal[:12]} is denied")


@click.command(epilog=EXIT_CODES)
@click.argument("proposal")
@click.option("--why", default="", help="State a reason.")
@_NODE
def stop(proposal: str, why: str, node: Path) -> None:
    """Stop the run of a PROPOSAL at all parties."""
    NodeClient(node).stop(proposal, why)
    click.echo(f"{proposal[:12]} is stopped")


@click.command(epilog=EXIT_CODES)
@click.argument("proposal")
@_NODE
def logs(proposal: str, node: Path) -> None:
    """Print the end of this party's log of a run, as JSON lines."""
    click.echo(NodeClient(node).ask(f"/v1/proposals/{proposal}/log")["log"], nl=False)


@click.command(epilog=EXIT_CODES)
@_NODE
def members(node: Path) -> None:
    """List the members of this node's collaborations, with the pins of their keys."""
    rows = [
        (
            name,
            "connected" if facts["connected"] else "away",
            facts["known_pin"],
            "" if facts["known_pin"] == facts["pin"] else "THE HUB REPORTS ANOTHER KEY",
        )
        for name, facts in NodeClient(node).ask("/v1/members").items()
    ]
    for line in align_columns([("member", "state", "pin", ""), *rows]):
        click.echo(line.rstrip())
