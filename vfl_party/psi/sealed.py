"""What one passive party sends another through the active party, sealed so that the active party
cannot read it.

Each party makes a ``KeyPair``, a key pair of X25519 for one run, and introduces it: it signs the
public key with the key of its certificate. A message is encrypted with ChaCha20-Poly1305 (RFC
8439). Its key comes from both parties' keys (RFC 7748, section 6.1) through HKDF-SHA256 (RFC 5869),
another one for each direction.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.utils import CryptographyDeprecationWarning

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_party.psi import curve

PUBLIC_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
# Of a sealed message, beside what it says.
OVERHEAD = _NONCE_BYTES + _TAG_BYTES
# The spaces are those of TLS 1.3 (RFC 8446, section 4.4.3): no version of TLS signs anything that
# begins like this and goes on with our words, so a signature of a handshake is no introduction, nor
# the reverse.
_INTRODUCTION = b" " * 64 + b"vfl psi v1 introduction\0"
_SEALED = b"vfl psi v1 sealed"
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class KeyPair:
    """A key pair of X25519: ``secret``, 32 bytes, is all there is to store."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        return cls(os.urandom(32))

    @property
    def public(self) -> bytes:
        """The public key, ``PUBLIC_BYTES`` long."""
        return self._key.public_key().public_bytes_raw()

    def introduction(self, credentials: Credentials, context: bytes) -> bytes:
        """Returns the public key, a signature over ``context`` and the public key, and the
        certificate.

        Behind the certificate follow the intermediates of its chain, if there are any.

        ``context``: what the introduction is good for, such as the run.
        Raises InputError (CERTIFICATE_INVALID) if the certificate's key is neither ECDSA nor RSA.
        """
        key, said = load_pem_private_key(credentials.key_pem, None), _said(context, self.public)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            signature = key.sign(said, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPrivateKey):
            signature = key.sign(said, _PSS, SHA256())
        else:
            text = (
                f"the key of {credentials.certificate_file} is neither ECDSA nor RSA; make "
                "another, have it signed"
            )
            raise InputError(Code.CERTIFICATE_INVALID, text)
        # Encoded anew: the file may hold more than the certificates, even the key.
        chain = b"".join(each.public_bytes(Encoding.PEM) for each in credentials.chain[:-1])
        return self.public + len(signature).to_bytes(2, "little") + signature + chain

    def seal(self, peer_public: bytes, context: bytes, plain: bytes) -> bytes:
        """Encrypts ``plain`` for the peer; the result is ``OVERHEAD`` bytes longer.

        The nonce is random. So a batch may be sealed again in its context, even with other content
        after a fault: that shows nothing, not even whether it is the same. 12 random bytes do for
        2^32 messages of one key (NIST SP 800-38D, section 8.3, says so of nonces of this size).

        Args:
            peer_public: the peer's key, from ``verified``.
            context: what the message is: run, step, sender, receiver. It is not sent; the peer
                opens with the same.
            plain: what only the peer may read.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(peer_public, self.public, peer_public).encrypt(
            nonce, plain, context
        )

    def open(self, peer_public: bytes, context: bytes, sealed: bytes, party: str) -> bytes:
        """Decrypts what the peer ``party`` has sealed for this identity.

        Raises PeerError (MALFORMED_MESSAGE) if it was changed, or sealed by another, for another or
        in another context.
        """
        nonce, encrypted = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            if len(sealed) < OVERHEAD:
                raise InvalidTag
            return self._cipher(peer_public, peer_public, self.public).decrypt(
                nonce, encrypted, context
            )
        except InvalidTag:
            text = (
                f"what {party} has sealed does not open: it was changed on its way, or was for "
                "another party or step"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party) from None

    @property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret)

    def _cipher(self, peer_public: bytes, sender: bytes, receiver: bytes) -> ChaCha20Poly1305:
        shared = self._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
        return ChaCha20Poly1305(
            HKDF(SHA256(), 32, None, _SEALED + sender + receiver).derive(shared)
        )


def verified(introduction: bytes, credentials: Credentials, party: str, context: bytes) -> bytes:
    """Returns the public key of an introduction, which the holder of ``party``'s certificate has
    signed.

    Args:
        introduction: what the peer's ``KeyPair.introduction`` gave.
        credentials: this process's, with the CA and the list of revoked certificates.
        party: who must have made it.
        context: what it must be good for.

    Raises PeerError: MALFORMED_MESSAGE if it cannot be read; IDENTITY_MISMATCH if the certificate
    is another party's, has another key than is pinned, or has not signed this; CERTIFICATE_INVALID
    if it is not from the CA, out of date or revoked.
    """
    public, rest = introduction[:PUBLIC_BYTES], introduction[PUBLIC_BYTES:]
    end = 2 + int.from_bytes(rest[:2], "little")
    signature = rest[2:end]
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        # What is only warned of today is refused, too.
        with warnings.catch_warnings():
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            certificate, *others = x509.load_pem_x509_certificates(rest[end:])
            key = certificate.public_key()
            chain = pem.chain_of(certificate, others[: pem.MOST_INTERMEDIATES], authorities)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, CryptographyDeprecationWarning):
        text = (
            f"the introduction of {party} cannot be read; run the same version of this program "
            "at all parties"
        )
        raise PeerError(Code.MALFORMED_MESSAGE, text, party=party) from None
    _require_chain(chain, certificate, credentials, party)
    said = _said(context, public)
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, said, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, said, _PSS, SHA256())
        else:
            raise InvalidSignature
    except InvalidSignature:
        text = (
            f"the introduction of {party} is not signed for this run with the key of its "
            "certificate"
        )
        raise PeerError(Code.IDENTITY_MISMATCH, text, party=party) from None
    curve.check(public, party)
    return public


def _require_chain(
    chain: list[x509.Certificate],
    certificate: x509.Certificate,
    credentials: Credentials,
    party: str,
) -> None:
    if not chain:
        text = (
            f"the certificate of {party} is from another CA than that of {credentials.name}; "
            "take both from one"
        )
        raise PeerError(Code.CERTIFICATE_INVALID, text, party=party)
    if not credentials.members.stand_for(certificate, party):
        words = credentials.members.words(certificate, party)
        text = f"the introduction of {party} has a certificate {words}"
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


def _said(context: bytes, public: bytes) -> bytes:
    return _INTRODUCTION + context + public
