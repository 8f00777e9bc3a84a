"""``vfl-party node``: a member's process that stays up, dials out to the hub, and runs parties.

The node verifies what the hub passes on: a run begins only if the proposal and the approvals of all
parties are signed with the keys that this node knows, and name the same recipe and the same keys.
It begins each run once.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from vfl.launcher.processes import Process
from vfl.simulation.federation import to_toml
from vfl.summary.rounds import History, PartyFolder
from vfl_common.config.base import parse
from vfl_common.config.policy import Digest, Pin
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import (
    Code,
    InputError,
    LostError,
    PeerError,
    UnwritableError,
    VflError,
)
from vfl_common.files import lock_file, write_atomic, write_private
from vfl_common.identity import pem
from vfl_common.identity.credentials import BOTH, Members, ends_soon
from vfl_common.identity.keyring import Keyring
from vfl_common.identity.signing import Envelope
from vfl_common.process.logs import Console
from vfl_common.text import clean, to_json
from vfl_hub import documents
from vfl_hub.children import Starter
from vfl_hub.documents import ReadProposal
from vfl_hub.front import Front
from vfl_hub.joining import check_certificate, make_request
from vfl_hub.runs import DirectTunnels, OwnRun
from vfl_hub.schedule import ENDED, State
from vfl_hub.settings import NodeFile, make_party_tables, needs_grants
from vfl_hub.streams import Client

log = logging.getLogger(__name__)
_NAME, _PIN = TypeAdapter[str](Name), TypeAdapter[str](Pin)
_CHECK_S = 300.0
_MIN_WAIT_S, _MAX_WAIT_S = 0.2, 5.0
_HOLD_S, _VOTE_AGAIN_S = 40.0, 30.0
DEFAULT_DAYS = 7


@dataclass
class Known:
    """A proposal as this node knows it.

    Args:
        entry: What the hub reports, see ``store.StoredProposal``.
        approved: This node's signed approval, or None.
        ended: The state and the reason at this node, or None while the run can go on. It never
            changes afterwards, whatever the hub reports.
        begun: Whether this node has begun the run.
        shared: The reason in ``ended`` as others may know it. The own reason may have paths.
    """

    entry: dict[str, Any]
    approved: dict[str, Any] | None = None
    ended: tuple[str, str] | None = None
    begun: bool = False
    shared: str = ""


class _Reported(BaseModel):
    """A proposal as the hub reports it; see ``store.StoredProposal``."""

    id: Digest
    envelope: dict[str, Any]
    state: State
    reason: str = ""
    votes: dict[str, dict[str, dict[str, Any]]] = {}
    token: str = ""


class Node:
    """The node.

    Args:
        path: The path of the node's file.
        settings: Its settings.
        console: Where events are shown.
    """

    def __init__(self, path: Path, settings: NodeFile, console: Console) -> None:
        self.settings, self._here = settings, path.absolute().parent
        self.folder, self.address = Path(settings.folder), settings.make_address()
        self._console, self._lock = console, threading.RLock()
        (self.folder / "proposals").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._lock_file = (self.folder / "lock").open("a")
        if not lock_file(self._lock_file, wait=False):
            raise InputError(
                Code.FILE_INVALID, f"{self.folder}: is in use by another node. Stop it first."
            )
        self._keyring = Keyring(settings.tls, settings.name, Members(), uses=BOTH)
        self._known = self._load()
        # A killed node may have left the party files of runs that have ended since.
        for path_ in self._here.glob(f".{settings.name}-{16 * '[0-9a-f]'}*.toml"):
            path_.unlink()
        self._pins: dict[str, str] = _read_json(self.folder / "pins.json") or {}
        self._pins[settings.hub_name] = settings.hub_pin
        self.members: dict[str, dict[str, Any]] = {}
        before = settings.launch.command if settings.launch is not None else ()
        self.starter = Starter(60.0 * settings.limits.warm_minutes, before)
        direct, self._direct, self._advertised = settings.direct, None, ""
        if direct.listen is not None:
            self._direct = Front(direct.listen, None, None, DirectTunnels(self))
            self._advertised = direct.advertise or self._direct.address
        self._runs: dict[str, OwnRun] = {}
        self._session, self._cursor, self._epoch = "", 0, ""
        # None until the hub has answered, or has not.
        self.connected: bool | None = None
        self._signing, self._vote_again_s = threading.Lock(), 0.0
        self._parsed: dict[str, ReadProposal] = {}
        self.stopped = threading.Event()
        self._outbox: queue.SimpleQueue[Callable[[Client], None]] = queue.SimpleQueue()

    # These methods talk to the hub.

    def run(self) -> None:
        """Talks to the hub until ``stopped`` is set."""
        threading.Thread(target=self._send_all, name="reports", daemon=True).start()
        client, wait_s = Client(self.address), _MIN_WAIT_S
        while not self.stopped.is_set():
            try:
                self._sync(client, hold=bool(self.connected))
                wait_s = _MIN_WAIT_S
            except VflError as error:
                self._set_connected(False, str(error))
                self.stopped.wait(wait_s)
                wait_s = min(_MAX_WAIT_S, 2 * wait_s)
            except Exception:
                log.exception("the hub's answer cannot be used")
                self.stopped.wait(_MAX_WAIT_S)
        client.close()
        self.close()

    def close(self) -> None:
        """Ends the programs of all runs. They go on when the node starts again."""
        self.stopped.set()
        with self._lock:
            runs = [*self._runs.values()]
            self._runs.clear()
        for run in runs:
            run.stop()
        self.starter.close()
        if self._direct is not None:
            self._direct.close()
        self._lock_file.close()

    def report(self) -> None:
        """Tells the hub what has changed at this node. Any thread may call it."""
        self._outbox.put(lambda client: self._sync(client, hold=False))

    def _send_all(self) -> None:
        client = Client(self.address)
        while not self.stopped.is_set():
            send = self._outbox.get()
            wait_s = _MIN_WAIT_S
            while not self.stopped.is_set():
                try:
                    send(client)
                    break
                except (LostError, UnwritableError):
                    self.stopped.wait(wait_s)
                    wait_s = min(_MAX_WAIT_S, 2 * wait_s)
                except VflError as error:
                    # The next news repeat what matters.
                    log.warning("%s", error)
                    self.stopped.wait(_MIN_WAIT_S)
                    break
                except Exception:
                    log.exception("a message to the hub failed")
                    break

    def _set_connected(self, connected: bool, why: str = "") -> None:
        if connected != self.connected:
            self.connected = connected
            facts = {"why": why} if why else {}
            self._console.emit("connected" if connected else "disconnected", **facts)

    def _open_session(self, client: Client) -> str:
        envelope = documents.sign_session(self._keyring.current(), self.settings.hub_pin)
        return str(client.ask("/v1/session", envelope.value)["token"])

    def renew(self) -> None:
        """Has the certificate signed again if it ends soon. Raises VflError."""
        credentials = self._keyring.current()
        if not ends_soon(credentials.certificate, datetime.now(UTC)):
            return
        request = make_request(credentials)
        client = Client(self.address)
        try:
            session = self._open_session(client)
            answer = client.ask("/v1/renew", {"request": request.decode()}, token=session)
        finally:
            client.close()
        content = str(answer["certificate"])
        csr = pem.parse_request(request, Path("request"))
        check_certificate(content, csr, Path(self.settings.tls.ca))
        write_atomic(Path(self.settings.tls.certificate), content)
        self._console.emit("renewed", name=self.settings.name)

    def _sync(self, client: Client, *, hold: bool) -> None:
        if not self._session:
            self._session = self._open_session(client)
        slots = self.settings.limits.count_slots(datetime.now())
        with self._lock:
            news = {
                "cursor": self._cursor,
                "slots": slots,
                "runs": self._describe_runs(),
                "hold": hold,
            }
            is_used = bool(self._runs)
        self.starter.end_if_idle(is_used=is_used)
        try:
            answer = client.ask("/v1/sync", news, token=self._session, timeout_s=_HOLD_S)
        except PeerError:
            # The session may have ended, for example because the hub was started again.
            self._session = ""
            raise
        self._set_connected(True)
        self._take(answer)

    def _describe_runs(self) -> dict[str, tuple[str, str]]:
        """Returns {run: state and reason at this node} of the runs that the hub has to know."""
        runs: dict[str, tuple[str, str]] = {}
        for number, known in self._known.items():
            if known.entry["state"] not in ENDED and known.ended is not None:
                runs[number] = (known.ended[0], known.shared)
        for number, run in self._runs.items():
            if number not in runs:
                runs[number] = (run.child.state, "")
        return runs

    def send_document(self, envelope: Envelope) -> dict[str, Any]:
        """Sends a document to the hub. Raises VflError if the hub refuses it or is away."""
        client = Client(self.address)
        try:
            token = self._open_session(client)
            answer: dict[str, Any] = client.ask("/v1/documents", envelope.value, token=token)
        finally:
            client.close()
        return answer

    def _take(self, answer: dict[str, Any]) -> None:
        """Takes the hub's news."""
        with self._lock:
            if self.stopped.is_set():
                # No run begins while the others end.
                return
            self.members = {
                name: {"pin": facts["pin"], "connected": bool(facts.get("connected"))}
                for name, facts in answer["members"].items()
                if _is_member(name, facts)
            }
            self._learn_pins()
            if answer.get("epoch", "") != self._epoch:
                # The hub was started again, perhaps with an older database.
                self._epoch, self._cursor = str(answer.get("epoch", "")), 0
            elif int(answer["cursor"]) >= self._cursor:
                for entry in answer["proposals"]:
                    try:
                        self._update(entry)
                    except UnwritableError:
                        # The disk is full. The same news are asked for again.
                        raise
                    except (VflError, ValueError) as error:
                        why = clean(str(error))
                        log.warning("a proposal is ignored: %s", why)
                        self._console.emit("ignored", run=clean(str(entry.get("id"))), why=why)
                self._cursor = int(answer["cursor"])
            self._watch()
            self._vote_again()
            for tunnel in answer["tunnels"]:
                run = self._runs.get(str(tunnel["run"]))
                if run is not None:
                    threading.Thread(
                        target=run.accept, args=(str(tunnel["tunnel"]),), daemon=True
                    ).start()

    def _learn_pins(self) -> None:
        """Stores the keys of new members. A key never changes without a person: ``trust``."""
        new = {
            name: str(facts["pin"])
            for name, facts in self.members.items()
            if name not in (*self._pins, self.settings.name)
        }
        if new:
            self._save_pins(self._pins | new)
            for name, pin in sorted(new.items()):
                self._console.emit("new_member", name=name, pin=pin)

    def _save_pins(self, pins: dict[str, str]) -> None:
        # A key that is not on the disk is not a known one.
        write_atomic(self.folder / "pins.json", to_json(pins), durable=True)
        self._pins = pins

    def trust(self, name: str, pin: str) -> None:
        """Replaces the known key of a member, after a person has compared the pin."""
        if name not in self.members or name in (self.settings.name, self.settings.hub_name):
            raise InputError(
                Code.CONFIG_INVALID, f"{name}: is not another member. See `vfl members`."
            )
        with self._lock:
            self._save_pins({**self._pins, name: pin})
            # Proposals that were ignored are asked for again.
            self._cursor, self._epoch = 0, ""

    def describe(self) -> dict[str, Any]:
        """Returns who this node is, its data sets, and whether the hub answers."""
        data = {
            name: {"description": one.description, "approval": one.approval}
            for name, one in self.settings.data.items()
        }
        return {
            "name": self.settings.name,
            "hub": self.settings.hub,
            "connected": bool(self.connected),
            "data": data,
            "max_runs": self.settings.limits.max_runs,
            "pin": self._get_pin(self.settings.name),
            "certificates_end": {
                name: end.isoformat(timespec="minutes")
                for name, end in self._keyring.ends().items()
            },
        }

    def list_members(self) -> dict[str, dict[str, Any]]:
        """Returns the members of this node's collaborations, with the pins that it knows."""
        # Nobody knows who is connected while the hub does not answer.
        return {
            name: {
                **facts,
                "connected": bool(facts["connected"] and self.connected),
                "known_pin": self.get_known_pin(name),
            }
            for name, facts in sorted(self.members.items())
        }

    def get_known_pin(self, name: str) -> str:
        """Returns the pin of a member's key that this node knows; '' if it knows none."""
        is_known = name in (*self._pins, self.settings.name)
        return self._get_pin(name) if is_known else ""

    def read_recipe(self, number: str) -> dict[str, Any]:
        """Returns the tables of a proposal's recipe."""
        with self._lock:
            return self._read(number).proposal.recipe

    # These methods take, make and answer proposals.

    def _update(self, entry: dict[str, Any]) -> None:
        entry = _Reported.model_validate(entry).model_dump()
        read = documents.read_proposal(entry["envelope"])
        proposer = read.proposal.by
        if entry["id"] != read.id:
            raise PeerError(Code.MALFORMED_MESSAGE, f"hub: {entry['id']} is not that proposal's id")
        pin = self._get_pin(proposer)
        documents.verify(read.envelope, proposer, pin, self._keyring.current())
        is_new = read.id not in self._known
        known = self._known.get(read.id, Known(entry))
        changed = known.entry["state"] != entry["state"]
        ended = known.ended
        if entry["state"] in ENDED and ended is None:
            ended = (entry["state"], entry["reason"])
        self._store(read.id, known, entry=entry, ended=ended)
        self._known[read.id] = known
        if is_new:
            self._console.emit("proposal", run=read.id[:16], name=read.recipe.name, by=proposer)
        if changed:
            self._console.emit(
                "run_state", run=read.id[:16], name=read.recipe.name, state=entry["state"]
            )
        if entry["state"] == "open":
            self._vote_again_s = 0.0

    def _vote_again(self) -> None:
        """Sends approvals that the hub does not have: those of a policy, and those that were lost
        because this node was killed or the hub's database was away.
        """
        if time.monotonic() < self._vote_again_s:
            return
        self._vote_again_s = time.monotonic() + _VOTE_AGAIN_S
        name = self.settings.name
        for number, known in self._known.items():
            has_vote = "approve" in known.entry["votes"].get(name, {})
            if known.entry["state"] != "open" or known.ended is not None or has_vote:
                continue
            read = self._read(number)
            if name not in read.parties:
                continue
            if known.approved is not None or self._is_automatic(read):
                self._outbox.put(partial(self._approve_again, number))

    def _read(self, number: str) -> ReadProposal:
        """Returns a known proposal. The id is the digest of its bytes, so it never changes."""
        if number not in self._parsed:
            envelope = self._known[number].entry["envelope"]
            self._parsed[number] = documents.read_proposal(envelope)
        return self._parsed[number]

    def _is_automatic(self, read: ReadProposal) -> bool:
        data = self.settings.data.get(read.proposal.data[self.settings.name])
        return (
            data is not None
            and data.approval == "automatic"
            and read.proposal.by in (*data.proposers, self.settings.name)
        )

    def _approve_again(self, number: str, _client: Client) -> None:
        try:
            self.approve(number)
        except UnwritableError:
            # The disk is full. This is tried again.
            raise
        except InputError as error:
            log.warning("%s is not approved: %s", number[:16], error)

    def find(self, number: str) -> str:
        """Returns the whole id of a proposal from its beginning. Raises InputError."""
        with self._lock:
            matching = [one for one in self._known if number and one.startswith(number)]
        if len(matching) != 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{number}: must be the beginning of one proposal's id (got {len(matching)} "
                "proposals). See `vfl proposals`.",
            )
        return matching[0]

    def propose(
        self, recipe: dict[str, Any], data: dict[str, str], purpose: str, days: float
    ) -> str:
        """Signs a proposal and sends it. Returns its id. Raises VflError."""
        digest = parse(Recipe, recipe, "recipe").digest()
        proposal = parse(
            documents.Proposal,
            {
                "by": self.settings.name,
                "recipe": recipe,
                "digest": digest,
                "data": data,
                "purpose": clean(purpose),
                "until": time.time() + 86400.0 * days,
                "at": time.time(),
                "nonce": secrets.token_hex(16),
            },
            "proposal",
        )
        envelope = Envelope.seal(
            documents.PROPOSAL, proposal.model_dump(mode="json"), self._keyring.current()
        )
        read = documents.read_proposal(envelope.value)
        if self.settings.name in read.parties:
            self._require_data(read)
        return str(self.send_document(envelope)["id"])

    def approve(self, number: str) -> None:
        """Signs an approval, stores it, and sends it. Raises VflError."""
        read, data = self._find_data(number)
        known = self._known[number]
        peers = {peer: self._get_pin(peer) for peer in (*read.parties, self.settings.hub_name)}
        if known.ended is not None:
            raise InputError(
                Code.REFUSED, f"{number[:16]}: has ended ({known.ended[0]}). Propose it again."
            )
        with self._signing:
            if known.approved is None:
                if needs_grants(self.settings, data):
                    self._sign_grant(read, data)
                envelope = documents.sign_vote(
                    self._keyring.current(), number, "approve", peers, address=self._advertised
                )
                with self._lock:
                    # The vote is stored before it is sent, so the hub never has a vote that this
                    # node does not know.
                    self._store(number, known, approved=envelope.value)
        self.send_document(Envelope.read(known.approved, documents.VOTE))

    def _get_pin(self, name: str) -> str:
        if name == self.settings.name:
            return pem.compute_pin(self._keyring.current().certificate)
        if name not in self._pins:
            raise InputError(
                Code.CONFIG_INVALID, f"{name}: is not a member that this node knows. Deny it."
            )
        return self._pins[name]

    def _sign_grant(self, read: ReadProposal, data: str) -> None:
        """Signs the party's grant, which its program requires; see ``vfl-party approve``."""
        folder = self.folder / "runs" / read.id[:16]
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "recipe.toml", to_toml(read.proposal.recipe))
        file = self.write_party_file(read, data, folder, {})
        args = ["vfl-party", "approve", str(file), "--runs", "1", "--yes"]
        args += ["--purpose", read.proposal.purpose or f"proposal {read.id[:16]}"]
        try:
            process = Process(self.settings.name, args, folder, threads=1)
            process.wait()
        finally:
            file.unlink(missing_ok=True)
        if process.status:
            raise InputError(
                Code.REFUSED, f"{read.id[:16]}: no grant is signed ({process.sentence()}). Deny it."
            )

    def preview(self, number: str) -> tuple[str, bool]:
        """Returns what ``vfl-party check`` prints about a proposal and this member's data, and
        whether the run could begin. Raises InputError if this member is not a party, or does not
        have the data set.
        """
        read, data = self._find_data(number)
        with tempfile.TemporaryDirectory(prefix="check-", dir=self.folder) as place:
            folder = Path(place)
            write_atomic(folder / "recipe.toml", to_toml(read.proposal.recipe))
            file = self.write_party_file(read, data, folder, {}, suffix=f"-{folder.name}")
            return _ask_party("check", file, "--offline")

    def describe_data(self, name: str) -> dict[str, Any]:
        """Returns the policy of a data set, and the lines of ``vfl-party account --json``: what
        each peer has received in all runs of this node. Raises InputError if there is no such data.
        """
        if name not in self.settings.data:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{name}: is not a data set of this node. See `vfl members`.",
            )
        record, text = self._make_record(name), ""
        # A party that has sent nothing has no record.
        if (self._here / record["folder"] / f".record-{self.settings.name}").exists():
            tables = make_party_tables(self.settings, name, out=str(self.folder))
            file = self._here / f".{self.settings.name}-{secrets.token_hex(8)}.toml"
            write_private(file, to_toml({**tables, "record": record}))
            text, _ = _ask_party("account", file, "--json")
        try:
            account, problem = [json.loads(line) for line in text.splitlines()], ""
        except ValueError:
            account, problem = [], text
        policy = self.settings.data[name].party.get("policy", {})
        return {"name": name, "policy": policy, "account": account, "problem": problem}

    def _make_record(self, data: str) -> dict[str, Any]:
        # The record is that of all runs of this node, because limits and grants apply to all.
        return {"folder": str(self.folder), **self.settings.data[data].party.get("record", {})}

    def _find_data(self, number: str) -> tuple[ReadProposal, str]:
        """Returns a proposal and the name of this member's data set. Raises InputError."""
        with self._lock:
            read = self._read(number)
        name = self.settings.name
        if name not in read.parties:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{number[:16]}: {name} is not a party of this run. Choose another proposal.",
            )
        return read, self._require_data(read)

    def _require_data(self, read: ReadProposal) -> str:
        data = read.proposal.data[self.settings.name]
        if data not in self.settings.data:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{read.id[:16]}: asks for the data set {data}, and this node has "
                f"{', '.join(sorted(self.settings.data)) or 'none'}. Correct its name, or deny it.",
            )
        return data

    def decide(
        self, person: str, role: str, action: str, about: str, do: Callable[[], object]
    ) -> None:
        """Takes a person's action, and logs who took it and whether it was refused. Raises
        VflError.
        """
        facts, refusal = {"person": person, "role": role, "action": action, "about": about}, ""
        try:
            do()
        except VflError as error:
            refusal = clean(str(error))
            raise
        finally:
            log.info("decision", extra={"event": "decision", **facts, "refusal": refusal})

    def vote(self, number: str, kind: Literal["deny", "stop"], why: str = "") -> None:
        """Ends a run at this node, whatever the hub does, and signs and sends a denial or a request
        to stop it. Raises VflError.
        """
        with self._lock:
            known = self._known[number]
            if known.ended is None:
                verb = "denied" if kind == "deny" else "stopped"
                words = f"{verb} by {self.settings.name}"
                words = f"{words}: {clean(why)}" if why else words
                self._store(number, known, ended=("failed", words), shared=words)
                self._watch()
        self.send_document(documents.sign_vote(self._keyring.current(), number, kind, {}, why))

    def list_proposals(self, only: str = "") -> list[dict[str, Any]]:
        """Returns the proposals that this node knows, the newest first.

        ``only``: The id of the only one to return.
        """
        with self._lock:
            items = [
                (number, self._known[number], self._runs.get(number), self._read(number))
                for number in ([only] if only else self._known)
            ]
        rows = []
        for number, known, run, read in items:
            votes = {party: sorted(kinds) for party, kinds in sorted(known.entry["votes"].items())}
            rows.append(
                {
                    "id": number,
                    "name": read.recipe.name,
                    "by": read.proposal.by,
                    "parties": list(read.parties),
                    "data": read.proposal.data,
                    "purpose": read.proposal.purpose,
                    "digest": read.proposal.digest,
                    "at": read.proposal.at,
                    "until": read.proposal.until,
                    "state": known.entry["state"],
                    "reason": (known.ended or ("", ""))[1] or known.entry["reason"],
                    "votes": votes,
                    # The hub may not have the vote yet.
                    "voted": known.approved is not None or known.ended is not None,
                    "own": known.ended[0] if known.ended else run.child.state if run else "",
                    "last": run.last if run is not None else {},
                }
            )
        return sorted(rows, key=lambda row: -float(row["at"]))

    # These methods run parties.

    def _watch(self) -> None:
        """Begins, ends and removes runs as their states say."""
        for number, known in self._known.items():
            state, run = known.entry["state"], self._runs.get(number)
            if run is not None and known.ended is None and run.child.state in ("done", "failed"):
                ended, shared = (run.child.state, run.child.reason), ""
                if run.child.state == "failed":
                    shared = "its program failed; its people see the reason"
                    log.warning("run %s failed: %s", number[:16], run.child.reason)
                self._store(number, known, ended=ended, shared=shared)
            if run is not None and (state in ENDED or known.ended is not None):
                threading.Thread(target=run.stop, daemon=True).start()
                del self._runs[number]
                continue
            if state == "running" and run is None and known.ended is None:
                self._begin(number, known)

    def find_run(self, number: str) -> OwnRun | None:
        """Returns a running run of this node, or None. Any thread may call it."""
        with self._lock:
            return self._runs.get(number)

    def _find_direct(self, read: ReadProposal, known: Known) -> str:
        """Returns the address of the active party's node without the hub, or ''."""
        active = read.recipe.active.name
        if active not in self.settings.direct.dial:
            return ""
        _, vote = documents.read_vote(known.entry["votes"][active]["approve"])
        return vote.address

    def _begin(self, number: str, known: Known) -> None:
        read = self._read(number)
        if self.settings.name not in read.parties:
            return
        slots = self.settings.limits.count_slots(datetime.now())
        if not known.begun and len(self._runs) >= slots:
            # The hub should have waited.
            return
        try:
            self._check_begin(read, known)
            self._store(number, known, begun=True)
            direct = self._find_direct(read, known)
            self._runs[number] = OwnRun(self, read, str(known.entry["token"]), direct)
        except UnwritableError:
            # The disk is full. This is tried again with the next news.
            raise
        except Exception as error:
            if not isinstance(error, VflError | OSError):
                log.exception("run %s cannot begin", number[:16])
            where = f"refused at {self.settings.name}"
            public = error.public if isinstance(error, VflError) else type(error).__name__
            self._store(
                number,
                known,
                ended=("failed", clean(f"{where}: {error}")),
                shared=clean(f"{where}: {public}"),
            )
        self.report()

    def _check_begin(self, read: ReadProposal, known: Known) -> None:
        """Raises PeerError unless all parties have approved this proposal with the same keys."""
        if known.approved is None:
            raise PeerError(Code.REFUSED, f"{self.settings.name} has not approved it")
        if not known.begun and time.time() > read.proposal.until + documents.CLOCK_S:
            raise PeerError(Code.REFUSED, "it begins after the time of the proposal")
        self._find_data(read.id)
        peers = {name: self._get_pin(name) for name in (*read.parties, self.settings.hub_name)}
        if read.recipe.server != self.settings.hub_name:
            raise PeerError(Code.REFUSED, f"the server is not {self.settings.hub_name}")
        for party in read.parties:
            value = (
                known.approved
                if party == self.settings.name
                else known.entry["votes"].get(party, {}).get("approve")
            )
            if value is None:
                raise PeerError(Code.REFUSED, f"{party} has not approved it", party=party)
            envelope, vote = documents.read_vote(value)
            documents.verify(envelope, party, peers[party], self._keyring.current())
            if (vote.proposal, vote.party, vote.kind) != (read.id, party, "approve"):
                raise PeerError(
                    Code.REFUSED, f"the approval of {party} is for another run", party=party
                )
            if vote.peers != peers:
                raise PeerError(
                    Code.IDENTITY_MISMATCH,
                    f"{party} knows other keys than {self.settings.name}. Compare the pins of "
                    "`vfl members`.",
                    party=party,
                )

    def write_party_file(
        self,
        read: ReadProposal,
        data: str,
        folder: Path,
        addresses: dict[str, str],
        suffix: str = "",
    ) -> Path:
        """Writes the party file of a run. It is beside the node's file, so that relative paths in
        the data set's settings mean the same.
        """
        pins = {
            name: self._get_pin(name)
            for name in (*read.parties, self.settings.hub_name)
            if name != self.settings.name
        }
        tables = make_party_tables(
            self.settings,
            data,
            recipe=str(folder / "recipe.toml"),
            out=str(folder),
            pins=pins,
            **addresses,
        )
        tables["record"] = self._make_record(data)
        path = self._here / f".{self.settings.name}-{read.id[:16]}{suffix}.toml"
        write_private(path, to_toml(tables))
        return path

    def read_log(self, number: str, max_bytes: int = 65_536) -> str:
        """Returns the end of the party's log of a run."""
        path = self.get_run_folder(number) / "log.jsonl"
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read().decode(errors="replace")

    def get_run_folder(self, number: str) -> Path:
        """Returns the folder of this party's files of a run, which may not exist yet."""
        run = number[:16]
        return self.folder / "runs" / run / run / self.settings.name

    def find_report(self, number: str) -> Path | None:
        """Returns the page that ``vfl report`` has made of a run; None if there is none."""
        folder = self.get_run_folder(number)
        paths = [folder / "report.html", folder.parent / "report.html"]
        return next((path for path in paths if path.is_file() and not path.is_symlink()), None)

    def read_progress(self, number: str) -> dict[str, Any]:
        """Returns the rounds, the bytes and the metrics of a run so far, as this party's files have
        them: ``phases`` {phase: [finished rounds, planned rounds]}, ``bytes`` {sent, received}, and
        ``curves``, a list of {phase, split, metric, points}.
        """
        source = PartyFolder(self.get_run_folder(number))
        history = History(source)
        if source.has_rounds:
            history.update()
        plan = source.read("run.json").get("plan", [])
        phases = {str(phase["name"]): [0, int(phase["rounds"])] for phase in plan}
        curves: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for row in history.rounds:
            phases[row.phase] = [row.round, row.rounds]
            for split, metrics in row.metrics.items():
                for metric, value in metrics.items():
                    if math.isfinite(value):
                        points = curves.setdefault((row.phase, split, metric), [])
                        points.append((row.round, value))
        last = history.rounds[-1].values if history.rounds else {}
        return {
            "phases": phases,
            "bytes": {key: int(last.get(f"bytes/{key}", 0)) for key in ("sent", "received")},
            "curves": [
                {"phase": phase, "split": split, "metric": metric, "points": points}
                for (phase, split, metric), points in curves.items()
            ],
        }

    def clean(self) -> None:
        """Removes the folders of runs that ended more than ``limits.keep_days`` ago."""
        days = self.settings.limits.keep_days
        if days is None:
            return
        with self._lock:
            old = [
                number
                for number, known in self._known.items()
                if known.ended is not None
                and number not in self._runs
                and time.time() - self._find_file(number).stat().st_mtime > 86400 * days
            ]
        for number in old:
            folder = self.folder / "runs" / number[:16]
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
                self._console.emit("removed", run=number[:16], after_days=days)

    # These methods read and write the files of the node.

    def _store(self, number: str, known: Known, **changes: Any) -> None:
        """Changes a proposal on the disk, and only then here: nothing is known that a restart would
        forget. Raises UnwritableError.
        """
        write_atomic(self._find_file(number), to_json(vars(known) | changes), durable=True)
        vars(known).update(changes)

    def _find_file(self, number: str) -> Path:
        return self.folder / "proposals" / f"{number}.json"

    def _load(self) -> dict[str, Known]:
        known = {}
        for path in sorted((self.folder / "proposals").glob("*.json")):
            value = _read_json(path)
            if value is None:
                raise InputError(
                    Code.FILE_INVALID, f"{path}: cannot be read. Restore it from a backup."
                )
            ended = tuple(value["ended"]) if value["ended"] else None
            known[path.stem] = Known(
                value["entry"], value["approved"], ended, value["begun"], value.get("shared", "")
            )
        return known


def _ask_party(command: str, file: Path, *options: str) -> tuple[str, bool]:
    """Returns what a command of ``vfl-party`` prints about a party file, and whether it succeeded.
    Removes the file.
    """
    args = [sys.executable, "-P", "-m", "vfl_party", command, str(file), *options]
    try:
        done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        return f"the check took more than {_CHECK_S:.0f} s", False
    finally:
        file.unlink(missing_ok=True)
    return done.stdout + done.stderr, not done.returncode


def _is_member(name: Any, facts: Any) -> bool:
    """Returns whether the hub reports a possible member."""
    try:
        _NAME.validate_python(name)
        _PIN.validate_python(facts["pin"])
    except (ValidationError, KeyError, TypeError):
        log.warning("the hub reports an impossible member")
        return False
    return True


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read. Restore it from a backup."
        ) from None
