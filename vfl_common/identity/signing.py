"""Signs messages with the key of a certificate, and verifies the certificates and signatures of
peers. Statements are signed in DSSE envelopes (Dead Simple Signing Envelope, v1.0.2) with the
signer's certificates.
"""

from __future__ import annotations

import base64
import binascii
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.utils import CryptographyDeprecationWarning

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_common.text import to_json

_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


def sign(credentials: Credentials, message: bytes) -> bytes:
    """Returns a signature over ``message``: ECDSA or RSA-PSS, both with SHA-256.

    Raises InputError (CERTIFICATE_INVALID) if the certificate's key is neither ECDSA nor RSA.
    """
    key = load_pem_private_key(credentials.key_pem, None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(message, ec.ECDSA(SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(message, _PSS, SHA256())
    raise InputError(
        Code.CERTIFICATE_INVALID,
        f"{credentials.certificate_file}: the key of the certificate is neither ECDSA nor RSA. "
        "Make another key, and have it signed.",
    )


def is_signature_of(certificate: x509.Certificate, message: bytes, signature: bytes) -> bool:
    """Returns whether ``signature`` is a valid signature over ``message`` with the key of
    ``certificate``.
    """
    key = certificate.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, message, _PSS, SHA256())
        else:
            return False
    except InvalidSignature:
        return False
    return True


def encode_chain(credentials: Credentials) -> bytes:
    """Returns the certificate and its intermediates in PEM, without other contents of its file,
    such as the key.
    """
    chain = credentials.chain[:-1]
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain)


def verify_chain(chain: bytes, credentials: Credentials, party: str, what: str) -> x509.Certificate:
    """Verifies a peer's certificate chain and returns the peer's own certificate.

    Args:
        chain: The result of ``chain_pem`` at the peer.
        credentials: This process's credentials, with the CA and the list of revoked certificates.
        party: The party for which the certificate must stand.
        what: The words in an error for the message that contains the chain, such as "the
            introduction".

    Raises PeerError: MALFORMED_MESSAGE if the chain cannot be read; IDENTITY_MISMATCH if the
    certificate is another party's, or its key is not the pinned one; CERTIFICATE_INVALID if it is
    from another CA, out of date or revoked.
    """
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        # A deprecated encoding, for which cryptography only warns, is refused as well.
        with warnings.catch_warnings():
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            certificate, *intermediates = x509.load_pem_x509_certificates(chain)
            certificate.public_key()
            found_chain = pem.build_chain(
                certificate, intermediates[: pem.MAX_INTERMEDIATES], authorities
            )
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, CryptographyDeprecationWarning):
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{what} of {party} cannot be read. Run the same version of this program at all "
            "parties.",
            party=party,
        ) from None
    _require_chain(found_chain, certificate, credentials, party, what)
    return certificate


def _require_chain(
    chain: Sequence[x509.Certificate],
    certificate: x509.Certificate,
    credentials: Credentials,
    party: str,
    what: str,
) -> None:
    if not chain:
        raise PeerError(
            Code.CERTIFICATE_INVALID,
            f"the certificate of {party} is not from the CA of {credentials.name}. Use "
            "certificates of one CA.",
            party=party,
        )
    if not credentials.members.stands_for(certificate, party):
        raise PeerError(
            Code.IDENTITY_MISMATCH,
            f"{what} of {party} has a certificate {credentials.members.words(certificate, party)}. "
            f"Use one for {party} alone.",
            party=party,
        )
    now = datetime.now(UTC)
    for chain_certificate in chain:
        if problem := pem.find_validity_problem(chain_certificate, now):
            raise PeerError(
                Code.CERTIFICATE_INVALID,
                f"the certificate of {party} {problem} (by the clock of {credentials.name}, "
                f"{pem.utc(now)}). Renew it, or correct the clock.",
                party=party,
            )
    if problem := pem.find_key_problem(certificate.public_key()):
        raise PeerError(
            Code.CERTIFICATE_INVALID,
            f"the key of the certificate of {party} {problem}",
            party=party,
        )
    credentials.admit(party, certificate)


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
