"""Implements additively homomorphic encryption of pairs of numbers. The owner of the private key
decrypts sums that other parties have computed.

A scheme is chosen by name: ``ou`` (Okamoto-Uchiyama), ``paillier``, or ``none``, which does not
encrypt and is only for trials. This package imports neither torch nor grpc, so that worker
processes need little memory.
"""

from vfl_party.homomorphic.choice import (
    SCHEMES,
    Encryption,
    check,
    cipher_bytes,
    count_sums_per_cipher,
    has_heu,
    key_room,
    make_adder,
    make_keys,
)
from vfl_party.homomorphic.scheme import Adder, CipherError, Integers, Keys, Wire, ciphers_for
from vfl_party.homomorphic.sums import bucket_sums

__all__ = [
    "SCHEMES",
    "Adder",
    "CipherError",
    "Encryption",
    "Integers",
    "Keys",
    "Wire",
    "bucket_sums",
    "check",
    "cipher_bytes",
    "ciphers_for",
    "count_sums_per_cipher",
    "has_heu",
    "key_room",
    "make_adder",
    "make_keys",
]
