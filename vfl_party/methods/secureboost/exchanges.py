"""The exchanges while trees grow and when rows walk through them; all tensors contain integers or
ciphertexts.
"""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_party.methods.secureboost.settings import MAX_CODES, SecureBoostSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, i64, u8

# Bits of the active party's verdict on a round.
BEST, STOP = 1, 2
# The most entries of a party in a tree.
MAX_ENTRIES = 1 << 17
# Columns of numbers, their splits, columns of categories by their number of entries.
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
    """Declares the sizes of a party's entries up, and g and h of each row down. The tensor's name
    says whether they are encrypted.
    """
    name = "unencrypted" if settings.encryption == "none" else "ciphertexts"
    down = Sent(Kind.GRADIENT, {name: u8("rows", "bytes")}, how=settings.protection)
    return Exchange("gradients", Sent(Kind.ROWS, {"sizes": i64("parts")}), down, when="every tree")


def sums(settings: SecureBoostSettings) -> Exchange:
    """Declares the sums of the entries up, in an order that only the sender knows, and the chosen
    entries down.

    A ciphertext carries several sums.
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
    """Declares one bit for each row and tree up, and the nodes at which the rows stand down: a
    level a step.
    """
    up = Sent(Kind.ROWS, {"left": u8("packed")})
    return Exchange(
        "walk", up, Sent(Kind.ROWS, {"nodes": u8("rows", "trees")}), when=f"{when}, every level"
    )
