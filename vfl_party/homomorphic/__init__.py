"""Additively homomorphic encryption of pairs of numbers: the owner of the private key reads sums
that others have computed.

A scheme is chosen by name: ``ou`` (Okamoto-Uchiyama) and ``paillier`` encrypt; ``none`` does not,
for trials. The workers stay small: no torch, no grpc.
"""

from vfl_party.homomorphic.buckets import bucket_sums
from vfl_party.homomorphic.choice import (
    SCHEMES,
    Encryption,
    adder,
    check,
    cipher_bytes,
    has_heu,
    key_room,
    make_keys,
    together,
)
from vfl_party.homomorphic.packing import ciphers_for
from vfl_party.homomorphic.scheme import Adder, CipherError, Integers, Keys, Wire

__all__ = [
    "SCHEMES",
    "Adder",
    "CipherError",
    "Encryption",
    "Integers",
    "Keys",
    "Wire",
    "adder",
    "bucket_sums",
    "check",
    "cipher_bytes",
    "ciphers_for",
    "has_heu",
    "key_room",
    "make_keys",
    "together",
]
