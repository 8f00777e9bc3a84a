"""How a member joins: a token, a key that is made at home, and a certificate for it."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from pydantic import ValidationError

from vfl.certs import authority
from vfl.simulation.federation import to_toml
from vfl_common.config.base import Section
from vfl_common.config.policy import Pin
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError, LostError
from vfl_common.files import write_private
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_common.process.logs import version
from vfl_hub.store import Store
from vfl_hub.streams import Client, HubAddress

TOKEN_S = 86_400.0
# Seconds after which it is looked again whether a certificate ends soon.
RENEW_S = 3600.0
_POLL_S = 1.0


class Invitation(Section):
    """An invitation.

    Args:
        url: The hub's URL.
        name: The name of the invited member.
        hub: The hub's name.
        hub_pin: The pin of the hub's key.
        ca: The certificate of the federation's CA in PEM.
        secret: The secret that allows one key to be certified.
    """

    url: str
    name: Name
    hub: Name
    hub_pin: Pin
    ca: str
    secret: str

    def encode(self) -> str:
        """Returns the token as text."""
        return base64.urlsafe_b64encode(self.model_dump_json().encode()).decode().rstrip("=")


def read_token(text: str) -> Invitation:
    """Reads a token. Raises InputError if it is not one."""
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        return Invitation.model_validate(json.loads(base64.urlsafe_b64decode(padded)))
    except (ValueError, binascii.Error, ValidationError):
        raise InputError(
            Code.CONFIG_INVALID,
            "token: cannot be read. Copy the whole line of `vfl-server invite`.",
        ) from None


def invite(
    store: Store, folder: Path, url: str, name: str, hub: str, collaborations: Sequence[str]
) -> Invitation:
    """Adds an invitation and returns its token. ``folder``: the hub's folder of certificates."""
    authority.check_name(name)
    same = [one for one in (hub, *store.members()) if one.lower() == name.lower()]
    if (same and same[0] != name) or name == hub:
        raise InputError(
            Code.CONFIG_INVALID, f"{name}: is too similar to {same[0]}. Choose another name."
        )
    if not url.startswith(("https://", "http://")):
        raise InputError(
            Code.CONFIG_INVALID, f"--url {url}: must begin with https://. Write https://host:port."
        )
    certificate = folder / f"{hub}.pem"
    secret = secrets.token_urlsafe(32)
    store.invite(sha256(secret.encode()).hexdigest(), name, collaborations, time.time() + TOKEN_S)
    pin = pem.compute_pin(pem.parse_certificates(pem.read(certificate), certificate)[0])
    ca = pem.read(folder / "ca.pem").decode()
    return Invitation(url=url, name=name, hub=hub, hub_pin=pin, ca=ca, secret=secret)


def join(
    token: Invitation,
    folder: Path,
    wait_s: float,
    tell: Callable[[str], None],
    *,
    proxy: str = "",
    gateway: bool = False,
) -> Path:
    """Makes a key, asks the hub for a certificate, and writes the file of the node.

    Args:
        token: The invitation.
        folder: The folder of the new files.
        wait_s: The seconds to wait for the operator of the hub.
        tell: Called with sentences for a person.
        proxy: The URL of an HTTP proxy, or ''.
        gateway: Whether a gateway with a public certificate ends TLS in front of the hub.

    Returns the path of ``node.toml``. Raises InputError, or LostError if the operator has not
    admitted the member in time; the same call goes on.
    """
    certs = folder / "certs"
    certs.mkdir(parents=True, exist_ok=True)
    request = certs / f"{token.name}.csr"
    ca = certs / "ca.pem"
    if ca.exists() and ca.read_text() != token.ca:
        raise InputError(
            Code.FILE_INVALID, f"{ca}: is of another federation. Join in another folder."
        )
    if not request.exists():
        authority.create_request(certs, token.name)
    ca.write_text(token.ca)
    parsed = pem.parse_request(pem.read(request), request)
    name, pin = ("", "") if gateway else (token.hub, token.hub_pin)
    address = HubAddress(token.url, name, ca, proxy, pin=pin)
    client, give_up_s = Client(address), time.monotonic() + wait_s
    asked = {"secret": token.secret, "request": request.read_text(), "version": version()}
    certificate = client.ask("/v1/join", asked)["certificate"]
    # The operator can admit the member as soon as a person knows the pin.
    tell(f"the pin of your key, for the operator of the hub: {pem.compute_pin(parsed)}")
    while not certificate:
        if time.monotonic() >= give_up_s:
            raise LostError(
                Code.PARTY_LOST,
                f"{token.url}: the operator has not admitted {token.name}. Run the command again.",
            )
        time.sleep(_POLL_S)
        certificate = client.ask("/v1/join", asked)["certificate"]
    client.close()
    check_certificate(certificate, parsed, ca)
    (certs / f"{token.name}.pem").write_text(certificate)
    path = folder / "node.toml"
    if not path.exists():
        write_private(path, _make_file(token, proxy, gateway=gateway))
    return path


def make_request(credentials: Credentials) -> bytes:
    """Returns a signing request for the key that a member has."""
    key, _ = pem.parse_key(credentials.key_pem, Path("the key"))
    return authority.make_request(credentials.name, key)


def sign_request(folder: Path, name: str, request: str) -> bytes:
    """Signs a request with the CA in ``folder``. Returns the certificate. Raises InputError."""
    with tempfile.TemporaryDirectory() as place:
        csr = Path(place) / f"{name}.csr"
        csr.write_text(request)
        return authority.sign_request(csr, folder, name).read_bytes()


def check_certificate(content: str, request: x509.CertificateSigningRequest, ca: Path) -> None:
    """Raises InputError unless a certificate is for the key and the names of a request, and from
    the CA.
    """
    where = Path("the hub's certificate")
    certificate = pem.parse_certificates(content.encode(), where)[0]
    is_own = pem.compute_pin(certificate) == pem.compute_pin(request)
    is_issued = pem.find_issuer(certificate, pem.parse_certificates(pem.read(ca), ca)) is not None
    if not (is_own and is_issued and pem.names(certificate) == pem.names(request)):
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{where}: is not for this member's key and name. Ask the operator of the hub.",
        )


def _make_file(token: Invitation, proxy: str, *, gateway: bool) -> str:
    tables: dict[str, Any] = {
        "name": token.name,
        "hub": token.url,
        "hub_name": token.hub,
        "hub_pin": token.hub_pin,
        **({"proxy": proxy} if proxy else {}),
        **({"gateway": True} if gateway else {}),
        "tls": {
            "ca": "certs/ca.pem",
            "certificate": f"certs/{token.name}.pem",
            "key": f"certs/{token.name}.key",
        },
        "limits": {"max_runs": 1},
    }
    return to_toml(tables) + _EXAMPLE


_EXAMPLE = """
# A data set, for each table that may be used in runs:
#
# [data.customers]
# description = "customers since 2020"
# approval = "each"          # or "automatic", with proposers = ["bank"]
# [data.customers.party]     # the keys of a party file
# data = { source = "customers.csv", id = "customer" }
"""
