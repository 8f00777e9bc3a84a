"""Signed statements in envelopes of DSSE (Dead Simple Signing Envelope, v1.0.2), with the signer's
certificates beside.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import chain_pem, has_signed, shown, sign
from vfl_common.text import to_json


@dataclass(frozen=True)
class Envelope:
    """A statement of a payload type, with the signature over it and the signer's chain in PEM."""

    payload_type: str
    payload: bytes
    signature: bytes
    chain: str
    keyid: str = ""

    @classmethod
    def sealed(cls, payload_type: str, said: dict[str, Any], credentials: Credentials) -> Envelope:
        """Signs a statement with the party's key. Raises InputError if it is neither ECDSA nor
        RSA.
        """
        payload = to_json(said).encode()
        signature = sign(credentials, _encoded(payload_type, payload))
        keyid = pem.pin_of(credentials.certificate)
        return cls(payload_type, payload, signature, chain_pem(credentials).decode(), keyid)

    @classmethod
    def read(cls, value: Any, payload_type: str) -> Envelope:
        """Reads ``value``. Raises ValueError if it is no envelope of this type."""
        try:
            first = value["signatures"][0]
            found = cls(
                str(value["payloadType"]),
                base64.b64decode(value["payload"], validate=True),
                base64.b64decode(first["sig"], validate=True),
                str(value["certificates"]),
                str(first.get("keyid", "")),
            )
            # JSON can write half of a character.
            found.chain.encode()
        except (KeyError, TypeError, IndexError, AttributeError, binascii.Error) as error:
            raise ValueError("no envelope") from error
        if found.payload_type != payload_type:
            raise ValueError(found.payload_type)
        return found

    @property
    def value(self) -> dict[str, Any]:
        """The envelope as JSON; ``certificates`` is beside what DSSE asks for."""
        return {
            "payloadType": self.payload_type,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [{"keyid": self.keyid, "sig": base64.b64encode(self.signature).decode()}],
            "certificates": self.chain,
        }

    @property
    def said(self) -> dict[str, Any]:
        """The statement. Raises ValueError if it is no JSON object."""
        try:
            found = json.loads(self.payload)
        except RecursionError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found

    def require_kept(self, path: Path, party: str, credentials: Credentials) -> x509.Certificate:
        """Returns the certificate with which ``party`` has signed. It may be out of date by now.

        Raises InputError that names ``path`` if the signature is not of a certificate of the CA for
        this party, or if the statement was changed.
        """
        authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
        try:
            certificate, *others = x509.load_pem_x509_certificates(self.chain.encode())
            chained = pem.chain_of(certificate, others[: pem.MOST_INTERMEDIATES], authorities)
        except ValueError:
            text = f"{path}: its certificates cannot be read"
            raise InputError(Code.CERTIFICATE_INVALID, text) from None
        if not chained or not credentials.members.stand_for(certificate, party):
            text = (
                f"{path}: is signed with a certificate that is not from this CA, or not of {party}"
            )
            raise InputError(Code.CERTIFICATE_INVALID, text)
        if not self._is_signed_by(certificate):
            raise InputError(Code.FILE_INVALID, f"{path}: was changed after {party} signed it")
        return certificate

    def require_shown(self, party: str, credentials: Credentials, what: str) -> x509.Certificate:
        """Returns the certificate with which a peer has signed what it shows now.

        ``what``: the statement, for the error: "the grant". Raises PeerError as ``signing.shown``
        does, or IDENTITY_MISMATCH if the peer has not signed it.
        """
        certificate = shown(self.chain.encode(), credentials, party, what)
        if not self._is_signed_by(certificate):
            text = f"{what} of {party} is not signed with the key of its certificate"
            raise PeerError(Code.IDENTITY_MISMATCH, text, party=party)
        return certificate

    def _is_signed_by(self, certificate: x509.Certificate) -> bool:
        said = _encoded(self.payload_type, self.payload)
        return has_signed(certificate, said, self.signature)


def _encoded(payload_type: str, payload: bytes) -> bytes:
    """What DSSE signs (its pre-authentication encoding)."""
    of = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(of), of, len(payload), payload)
