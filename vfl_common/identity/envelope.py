"""Signs statements and checks them, in DSSE envelopes (Dead Simple Signing Envelope, v1.0.2) with
the signer's certificates.
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
from vfl_common.identity.signing import encode_chain, is_signature_of, sign, verify_chain
from vfl_common.text import to_json


@dataclass(frozen=True)
class Envelope:
    """A signed statement: its type, its bytes, the signature, and the signer's certificate chain in
    PEM.
    """

    payload_type: str
    payload: bytes
    signature: bytes
    chain: str
    keyid: str = ""

    @classmethod
    def seal(
        cls, payload_type: str, statement: dict[str, Any], credentials: Credentials
    ) -> Envelope:
        """Signs a statement with the party's key. Raises InputError if the key is neither ECDSA nor
        RSA.
        """
        payload = to_json(statement).encode()
        signature = sign(credentials, _encode(payload_type, payload))
        keyid = pem.compute_pin(credentials.certificate)
        return cls(payload_type, payload, signature, encode_chain(credentials).decode(), keyid)

    @classmethod
    def read(cls, value: Any, payload_type: str) -> Envelope:
        """Reads ``value``. Raises ValueError if it is not an envelope of this type."""
        try:
            signature = value["signatures"][0]
            envelope = cls(
                str(value["payloadType"]),
                base64.b64decode(value["payload"], validate=True),
                base64.b64decode(signature["sig"], validate=True),
                str(value["certificates"]),
                str(signature.get("keyid", "")),
            )
            # Raises UnicodeEncodeError for a lone surrogate, which JSON can hold.
            envelope.chain.encode()
        except (KeyError, TypeError, IndexError, AttributeError, binascii.Error) as error:
            raise ValueError("the value is not a DSSE envelope") from error
        if envelope.payload_type != payload_type:
            raise ValueError(
                f"the envelope must have type {payload_type} (got {envelope.payload_type})"
            )
        return envelope

    @property
    def value(self) -> dict[str, Any]:
        """The envelope as a JSON object. The key ``certificates`` is not part of DSSE."""
        return {
            "payloadType": self.payload_type,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [{"keyid": self.keyid, "sig": base64.b64encode(self.signature).decode()}],
            "certificates": self.chain,
        }

    @property
    def statement(self) -> dict[str, Any]:
        """The statement. Raises ValueError if it is not a JSON object."""
        try:
            statement = json.loads(self.payload)
        except RecursionError:
            statement = None
        if not isinstance(statement, dict):
            raise ValueError("the statement is not a JSON object")
        return statement

    def verify_stored(self, path: Path, party: str, credentials: Credentials) -> x509.Certificate:
        """Returns the certificate with which ``party`` has signed. A certificate that has expired
        since is accepted.

        Raises InputError that names ``path`` if the CA has not issued the signer's certificate to
        this party, or if the statement was changed.
        """
        authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
        try:
            certificate, *intermediates = x509.load_pem_x509_certificates(self.chain.encode())
            chained = pem.build_chain(
                certificate, intermediates[: pem.MAX_INTERMEDIATES], authorities
            )
        except ValueError:
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: the certificates in it cannot be read. Get the file from {party} again.",
            ) from None
        if not chained or not credentials.members.stands_for(certificate, party):
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{path}: the signer's certificate is not from this CA, or not for {party}. Get "
                f"the file from {party} again.",
            )
        if not self._is_signed_by(certificate):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: was changed after {party} signed it. Get the file from {party} again.",
            )
        return certificate

    def require_shown(self, party: str, credentials: Credentials, what: str) -> x509.Certificate:
        """Returns the certificate with which a peer has signed a statement that it has just sent.
        The certificate must be valid now.

        ``what``: the words for the statement in an error, such as "the grant". Raises PeerError as
        ``signing.verify_chain`` does, or with IDENTITY_MISMATCH if the peer has not signed the
        statement.
        """
        certificate = verify_chain(self.chain.encode(), credentials, party, what)
        if not self._is_signed_by(certificate):
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"{what} of {party} is not signed with the key of its certificate",
                party=party,
            )
        return certificate

    def _is_signed_by(self, certificate: x509.Certificate) -> bool:
        message = _encode(self.payload_type, self.payload)
        return is_signature_of(certificate, message, self.signature)


def _encode(payload_type: str, payload: bytes) -> bytes:
    """Returns the bytes that DSSE signs (its pre-authentication encoding)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
