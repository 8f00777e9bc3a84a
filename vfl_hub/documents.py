"""Proposals and votes: the signed statements by which members start, allow and stop runs.

A proposal is known by the SHA-256 of its bytes, so a changed byte makes another proposal, which
needs new votes. The hub stores and passes on documents. Nodes verify them, because a hub may lie.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from vfl.simulation.federation import to_toml
from vfl_common.config.base import Section, match_pattern, parse
from vfl_common.config.party import Address
from vfl_common.config.policy import Digest, Pin
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials, Members
from vfl_common.identity.pem import compute_pin
from vfl_common.identity.signing import Envelope
from vfl_common.process.logs import version
from vfl_common.text import clean

PROPOSAL, VOTE, SESSION = (
    f"application/vnd.vfl.{kind}+json" for kind in ("proposal", "vote", "session")
)
MAX_DOCUMENT = 2**16
# The maximum difference between the clocks of a member and the hub.
CLOCK_S = 300.0
Text = Annotated[str, Field(max_length=500)]
DataName = Annotated[str, match_pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a short name")]
Kind = Literal["approve", "deny", "stop"]


class Proposal(Section):
    """A run that a member proposes.

    Args:
        by: The member that proposes it.
        recipe: The tables of the recipe.
        digest: The SHA-256 of the recipe.
        data: {party: the name of its data set}.
        purpose: The purpose, for the people who approve it.
        until: The last moment at which the run may begin, in seconds since 1970.
        at: The time of the signature.
        nonce: Random text, so that the same recipe can be proposed again.
    """

    by: Name
    recipe: dict[str, Any]
    digest: Digest
    data: dict[Name, DataName]
    purpose: Text = ""
    until: float
    at: float
    nonce: Annotated[str, match_pattern(r"[0-9a-f]{32}", "32 hexadecimal digits")]


class Vote(Section):
    """A member's approval or denial of a proposal, or its request to stop the run.

    Args:
        proposal: The id of the proposal.
        party: The member that votes.
        kind: What the member decides.
        peers: {member: pin of its key} of all parties and the server, for an approval.
        address: The address at which others reach this member's node without the hub, or ''.
        why: The reason, for people.
        at: The time of the signature in seconds since 1970.
    """

    proposal: Digest
    party: Name
    kind: Kind
    peers: dict[Name, Pin] = Field(default_factory=dict)
    address: Address | Literal[""] = ""
    why: Text = ""
    at: float


class SessionProof(Section):
    """A member's proof of its identity to the hub."""

    name: Name
    hub: Pin
    at: float
    nonce: Annotated[str, match_pattern(r"[0-9a-f]{32}", "32 hexadecimal digits")]
    version: Annotated[str, Field(max_length=64)] = ""


@dataclass(frozen=True)
class ReadProposal:
    """A proposal whose form was checked. ``envelope``: the signed bytes."""

    envelope: Envelope
    proposal: Proposal

    @property
    def id(self) -> str:
        """The SHA-256 of the signed bytes, in hexadecimal."""
        return hashlib.sha256(self.envelope.payload).hexdigest()

    @cached_property
    def recipe(self) -> Recipe:
        """The checked recipe."""
        return parse(Recipe, self.proposal.recipe, f"proposal {self.id[:12]}")

    @property
    def parties(self) -> tuple[str, ...]:
        """The names of the recipe's parties, the active one first."""
        return (self.recipe.active.name, *(party.name for party in self.recipe.passives))


def read_proposal(value: Any) -> ReadProposal:
    """Reads a proposal. Does not verify the signature.

    Raises InputError if it is not a proposal, or if recipe, digest, parties and data contradict
    each other.
    """
    envelope, proposal = _read(value, PROPOSAL, Proposal)
    result = ReadProposal(envelope, proposal)
    # Nodes and hub write the recipe as a file, which must mean the same.
    try:
        is_same = tomllib.loads(to_toml(proposal.recipe)) == proposal.recipe
        to_toml(proposal.recipe).encode()
    except ValueError:
        is_same = False
    if not is_same:
        raise InputError(
            Code.CONFIG_INVALID,
            "proposal: the recipe has values that TOML cannot have. Remove null, NaN and unpaired "
            "surrogates.",
        )
    if result.recipe.digest() != proposal.digest:
        raise InputError(
            Code.RECIPE_DIFFERS,
            f"proposal {result.id[:12]}: the digest is not that of its recipe. Propose it again.",
        )
    if set(proposal.data) != set(result.parties):
        raise InputError(
            Code.CONFIG_INVALID,
            f"proposal: names data of {', '.join(sorted(proposal.data)) or 'nobody'}, and the "
            f"parties of the recipe are {', '.join(result.parties)}. Give one data set a party.",
        )
    return result


def read_vote(value: Any) -> tuple[Envelope, Vote]:
    """Reads a vote. Does not verify the signature. Raises InputError if it is not one."""
    return _read(value, VOTE, Vote)


def read_session(value: Any) -> tuple[Envelope, SessionProof]:
    """Reads a proof of identity. Does not verify the signature. Raises InputError."""
    return _read(value, SESSION, SessionProof)


def _read(value: Any, kind: str, model: type[Any]) -> tuple[Envelope, Any]:
    name = kind.split(".")[-1].removesuffix("+json")
    try:
        envelope = Envelope.read(value, kind)
        if len(envelope.payload) > MAX_DOCUMENT:
            raise ValueError(f"it has more than {MAX_DOCUMENT:,} bytes")
        return envelope, parse(model, envelope.statement, name)
    except ValueError as error:
        raise InputError(
            Code.MALFORMED_MESSAGE, f"{name}: cannot be read ({error}). Sign it again."
        ) from None


def verify(envelope: Envelope, name: str, pin: str, authority: Credentials) -> None:
    """Verifies that a member has signed a document, with the key of ``pin``.

    Raises PeerError: IDENTITY_MISMATCH if the key is another one or the document was changed;
    CERTIFICATE_INVALID if the certificate is not from the federation's CA or is not valid.
    """
    certificate = envelope.require_shown(name, replace(authority, members=Members()), "a document")
    if compute_pin(certificate) != pin:
        raise PeerError(
            Code.IDENTITY_MISMATCH,
            f"{name}: signed with another key than the known one. Compare the pins with {name}.",
            party=name,
        )


def sign_session(credentials: Credentials, hub_pin: str) -> Envelope:
    """Signs a proof of identity to the hub with the key of ``hub_pin``."""
    session = SessionProof(
        name=credentials.name,
        hub=hub_pin,
        at=time.time(),
        nonce=secrets.token_hex(16),
        version=version(),
    )
    return Envelope.seal(SESSION, session.model_dump(mode="json"), credentials)


def find_version_problem(hub: str, node: str) -> str:
    """Returns why the versions of a hub and a node cannot work together; '' if they can.

    They may differ by a minor version. A version that is not known, or no release, can.
    """
    versions = [re.match(r"(\d+)\.(\d+)\.", text) for text in (hub, node)]
    if None in versions:
        return ""
    (major, minor), (node_major, node_minor) = (
        (int(one[1]), int(one[2])) for one in versions if one is not None
    )
    if major == node_major and abs(minor - node_minor) <= 1:
        return ""
    return (
        f"the hub has version {hub} and the node {clean(node)}, which differ by more than a minor "
        "version. Install the same version at both."
    )


def sign_vote(
    credentials: Credentials,
    proposal: str,
    kind: Kind,
    peers: Mapping[str, str],
    why: str = "",
    address: str = "",
) -> Envelope:
    """Signs a vote with the member's key. For the arguments, see ``Vote``."""
    vote = Vote(
        proposal=proposal,
        party=credentials.name,
        kind=kind,
        peers=dict(peers),
        address=address,
        why=clean(why),
        at=time.time(),
    )
    return Envelope.seal(VOTE, vote.model_dump(mode="json"), credentials)
