"""Signs with the key of a certificate, and checks what a peer shows and has signed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.utils import CryptographyDeprecationWarning

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials

_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


def sign(credentials: Credentials, said: bytes) -> bytes:
    """Returns a signature over ``said``: ECDSA or RSA-PSS, both with SHA-256.

    Raises InputError (CERTIFICATE_INVALID) if the certificate's key is neither ECDSA nor RSA.
    """
    key = load_pem_private_key(credentials.key_pem, None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(said, ec.ECDSA(SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(said, _PSS, SHA256())
    text = (
        f"the key of {credentials.certificate_file} is neither ECDSA nor RSA; make "
        "another, have it signed"
    )
    raise InputError(Code.CERTIFICATE_INVALID, text)


def has_signed(certificate: x509.Certificate, said: bytes, signature: bytes) -> bool:
    """Whether the key of a certificate has made a signature over ``said``."""
    key = certificate.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, said, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, said, _PSS, SHA256())
        else:
            return False
    except InvalidSignature:
        return False
    return True


def chain_pem(credentials: Credentials) -> bytes:
    """Returns the certificate and the intermediates of its chain, encoded anew: the file may hold
    more than the certificates, even the key.
    """
    return b"".join(each.public_bytes(Encoding.PEM) for each in credentials.chain[:-1])


def shown(chain: bytes, credentials: Credentials, party: str, what: str) -> x509.Certificate:
    """Returns the certificate that a peer shows, with the intermediates of its chain.

    Args:
        chain: what the peer's ``chain_pem`` gave.
        credentials: this process's, with the CA and the list of revoked certificates.
        party: whose it must be.
        what: the message that has it, for the error: "the introduction".

    Raises PeerError: MALFORMED_MESSAGE if it cannot be read; IDENTITY_MISMATCH if it is another
    party's, or has another key than is pinned; CERTIFICATE_INVALID if it is not from the CA, out of
    date or revoked.
    """
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        # What is only warned of today is refused, too.
        with warnings.catch_warnings():
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            certificate, *others = x509.load_pem_x509_certificates(chain)
            certificate.public_key()
            found = pem.chain_of(certificate, others[: pem.MOST_INTERMEDIATES], authorities)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, CryptographyDeprecationWarning):
        text = f"{what} of {party} cannot be read; run the same version of this program at all"
        raise PeerError(Code.MALFORMED_MESSAGE, f"{text} parties", party=party) from None
    _require_chain(found, certificate, credentials, party, what)
    return certificate


def _require_chain(
    chain: Sequence[x509.Certificate],
    certificate: x509.Certificate,
    credentials: Credentials,
    party: str,
    what: str,
) -> None:
    if not chain:
        text = (
            f"the certificate of {party} is from another CA than that of {credentials.name}; "
            "take both from one"
        )
        raise PeerError(Code.CERTIFICATE_INVALID, text, party=party)
    if not credentials.members.stand_for(certificate, party):
        words = credentials.members.words(certificate, party)
        text = f"{what} of {party} has a certificate {words}"
        raise PeerError(Code.IDENTITY_MISMATCH, text, party=party)
    now = datetime.now(UTC)
    for each in chain:
        if problem := pem.out_of_date(each, now):
            text = (
                f"the certificate of {party} {problem}; it is {pem.utc(now)} by the clock of "
                f"{credentials.name}"
            )
            raise PeerError(Code.CERTIFICATE_INVALID, text, party=party)
    if problem := pem.unusable(certificate.public_key()):
        raise PeerError(
            Code.CERTIFICATE_INVALID,
            f"the key of the certificate of {party} {problem}",
            party=party,
        )
    credentials.admit(party, certificate)
