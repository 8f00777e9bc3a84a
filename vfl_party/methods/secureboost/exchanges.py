"""Declares the exchanges for growing trees and for moving rows down the trees. All tensors contain
integers or ciphertexts.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.secureboost.settings import MAX_CODES, SecureBoostSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, i64, u8

# The bits of the active party's verdict on a round: it is the best so far, or it is the last.
BEST, STOP = 1, 2
# The maximum number of a party's entries (possible splits) in a tree.
MAX_ENTRIES = 1 << 17
# The length of an ``Offer`` on the wire: the number of numeric columns, the number of their splits,
# and the number of categorical columns for each number of entries.
FACTS = 2 + MAX_CODES + 1

KEY = Exchange(
    "key",
    Sent(Kind.ROWS, {"facts": i64(1 + FACTS)}),
    Sent(Kind.VERDICT, {"key": u8("room")}, label_free=True),
    when="once a generation",
)
PARTITION = Exchange(
    "partition",
    Sent(Kind.ROWS, {"left": u8("packed")}),
    Sent(Kind.ROWS, {"nodes": u8("rows")}),
    when="every level of a tree",
)
SAMPLE = Exchange("sample", NOTHING, Sent(Kind.ROWS, {"sampled": u8("packed")}), when="every round")
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(1)}), when="every round")


def gradients(settings: SecureBoostSettings) -> Exchange:
    """Declares the exchange of gradients: each passive party sends the numbers of its entries, and
    the active party sends g and h of each row. The tensor's name says whether they are encrypted.
    """
    name = "unencrypted" if settings.encryption == "none" else "ciphertexts"
    down = Sent(Kind.GRADIENT, {name: u8("rows", "bytes")}, how=settings.protection)
    return Exchange("gradients", Sent(Kind.ROWS, {"sizes": i64("parts")}), down, when="every tree")


def sums(settings: SecureBoostSettings) -> Exchange:
    """Declares the exchange of sums: each passive party sends the sums for its entries, in an order
    that only the sender knows. The active party returns the chosen entries.

    A ciphertext contains several sums.
    """
    name = "unencrypted" if settings.encryption == "none" else "ciphertexts"
    up = Sent(Kind.GRADIENT, {name: u8("sums", "bytes")}, how=settings.protection)
    return Exchange(
        "sums",
        up,
        Sent(Kind.VERDICT, {"chosen": u8("nodes", "entries")}),
        when="every level of a tree",
    )


def walk(when: str = "after the last tree") -> Exchange:
    """Declares the exchange that moves rows down the trees, one level per step. Each passive party
    sends one bit for each row and tree. The active party sends the nodes that the rows have
    reached.
    """
    up = Sent(Kind.ROWS, {"left": u8("packed")})
    return Exchange(
        "walk", up, Sent(Kind.ROWS, {"nodes": u8("rows", "trees")}), when=f"{when}, every level"
    )
