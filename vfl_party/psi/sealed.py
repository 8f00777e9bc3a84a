"""Seals messages that a passive party sends to another passive party through the active party, so
that the active party cannot read them.

Each party makes a ``KeyPair``, a key pair of X25519 for one run. It signs the public key with the
key of its certificate. A message is encrypted with ChaCha20-Poly1305 (RFC 8439). The encryption key
is derived from the keys of both parties (RFC 7748, section 6.1) with HKDF-SHA256 (RFC 5869). The
two directions have different encryption keys.
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
from vfl_common.identity.signing import encode_chain, is_signature_of, sign, verify_chain
from vfl_party.psi import curve

PUBLIC_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
# The bytes that sealing adds to a message.
OVERHEAD = _NONCE_BYTES + _TAG_BYTES
# TLS 1.3 also signs a text that begins with 64 spaces (RFC 8446, section 4.4.3), but continues with
# other words. So the signature of a TLS handshake is not valid for an introduction, nor the
# reverse.
_INTRODUCTION = b" " * 64 + b"vfl psi v1 introduction\0"
_SEALED = b"vfl psi v1 sealed"


@dataclass(frozen=True)
class KeyPair:
    """A key pair of X25519. The public key follows from ``secret``, 32 bytes."""

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
        """Returns the public key, a signature over ``context`` and the public key, and the chain of
        certificates.

        ``context``: The purpose of the introduction, such as the run's id.

        Raises InputError (CERTIFICATE_INVALID) if the certificate's key is neither ECDSA nor RSA.
        """
        signature = sign(credentials, _make_signed_text(context, self.public))
        return (
            self.public
            + len(signature).to_bytes(2, "little")
            + signature
            + encode_chain(credentials)
        )

    def seal(self, peer_public: bytes, context: bytes, message: bytes) -> bytes:
        """Encrypts ``message`` for the peer; the result is ``OVERHEAD`` bytes longer.

        The nonce is random. So a batch may be sealed again in the same context, even with other
        content after a fault. Random nonces of 12 bytes are enough for 2^32 messages per key (NIST
        SP 800-38D, section 8.3).

        Args:
            peer_public: The peer's public key, from ``verify_introduction``.
            context: A text with the run, step, sender and receiver of the message. It is not sent;
                the peer must pass the same context to ``open``.
            message: The plaintext, which only the peer can read.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._make_cipher(peer_public, self.public, peer_public).encrypt(
            nonce, message, context
        )

    def open(self, peer_public: bytes, context: bytes, sealed: bytes, party: str) -> bytes:
        """Decrypts a message that the peer ``party`` has sealed for this key pair.

        Raises PeerError (MALFORMED_MESSAGE) if the message was changed, or if its sender, its
        receiver or its context is another one.
        """
        nonce, encrypted = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            if len(sealed) < OVERHEAD:
                raise InvalidTag
            return self._make_cipher(peer_public, peer_public, self.public).decrypt(
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

    def _make_cipher(self, peer_public: bytes, sender: bytes, receiver: bytes) -> ChaCha20Poly1305:
        shared_secret = self._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
        return ChaCha20Poly1305(
            HKDF(SHA256(), 32, None, _SEALED + sender + receiver).derive(shared_secret)
        )


def verify_introduction(
    introduction: bytes, credentials: Credentials, party: str, context: bytes
) -> bytes:
    """Checks the introduction of ``party``, and returns the public key in it.

    Args:
        introduction: The bytes that the peer's ``KeyPair.introduction`` returned.
        credentials: The credentials of this process, with the CA and the list of revoked
            certificates.
        party: The party that must have signed the introduction.
        context: The purpose that the peer must have signed, such as the run's id.

    Raises:
        PeerError: MALFORMED_MESSAGE if the introduction cannot be read; IDENTITY_MISMATCH if the
            certificate belongs to another party, its key is not the pinned key, or the signature is
            invalid; CERTIFICATE_INVALID if the certificate is not from the CA, out of date or
            revoked.
    """
    public, signed_part = introduction[:PUBLIC_BYTES], introduction[PUBLIC_BYTES:]
    end = 2 + int.from_bytes(signed_part[:2], "little")
    signature = signed_part[2:end]
    certificate = verify_chain(signed_part[end:], credentials, party, "the introduction")
    if not is_signature_of(certificate, _make_signed_text(context, public), signature):
        raise PeerError(
            Code.IDENTITY_MISMATCH,
            f"{party}: its introduction is not signed for this run with the key of its "
            "certificate.",
            party=party,
        )
    curve.check_points(public, party)
    return public


def _make_signed_text(context: bytes, public: bytes) -> bytes:
    return _INTRODUCTION + context + public
