"""Seals what one passive party sends another through the active party, so that the active party
cannot read it.

Each party makes a ``KeyPair``, a key pair of X25519 for one run, and introduces it: it signs the
public key with the key of its certificate. A message is encrypted with ChaCha20-Poly1305 (RFC
8439). Its key comes from both parties' keys (RFC 7748, section 6.1) through HKDF-SHA256 (RFC 5869),
another one for each direction.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vfl_common.errors import Code, PeerError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import chain_pem, is_signature_of, sign, verify_chain
from vfl_party.psi import curve

PUBLIC_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
# The bytes that sealing adds to a message.
OVERHEAD = _NONCE_BYTES + _TAG_BYTES
# The spaces are those of TLS 1.3 (RFC 8446, section 4.4.3). No version of TLS signs a text that
# continues with our words, so a handshake's signature never passes as an introduction, nor the
# reverse.
_INTRODUCTION = b" " * 64 + b"vfl psi v1 introduction\0"
_SEALED = b"vfl psi v1 sealed"


@dataclass(frozen=True)
class KeyPair:
    """A key pair of X25519: ``secret``, 32 bytes, is all there is to store."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Makes a key pair from 32 random bytes."""
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
        signature = sign(credentials, _message(context, self.public))
        return (
            self.public + len(signature).to_bytes(2, "little") + signature + chain_pem(credentials)
        )

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
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party}: its sealed message cannot be opened: it was changed on its way, or was "
                "for another party or step.",
                party=party,
            ) from None

    @property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret)

    def _cipher(self, peer_public: bytes, sender: bytes, receiver: bytes) -> ChaCha20Poly1305:
        shared = self._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
        return ChaCha20Poly1305(
            HKDF(SHA256(), 32, None, _SEALED + sender + receiver).derive(shared)
        )


def verify_introduction(
    introduction: bytes, credentials: Credentials, party: str, context: bytes
) -> bytes:
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
    certificate = verify_chain(rest[end:], credentials, party, "the introduction")
    if not is_signature_of(certificate, _message(context, public), signature):
        raise PeerError(
            Code.IDENTITY_MISMATCH,
            f"{party}: its introduction is not signed for this run with the key of its "
            "certificate.",
            party=party,
        )
    curve.check(public, party)
    return public


def _message(context: bytes, public: bytes) -> bytes:
    return _INTRODUCTION + context + public
