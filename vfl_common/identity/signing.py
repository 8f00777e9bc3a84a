"""Signs messages with the key of a certificate, and verifies the certificates and signatures of
peers.
"""

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
