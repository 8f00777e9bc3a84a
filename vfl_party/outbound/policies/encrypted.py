"""Allows gradients, and sums of gradients, to leave only as ciphertexts."""

from __future__ import annotations

from vfl_common.bundle import Kind
from vfl_common.errors import Code, InputError
from vfl_party.outbound.declared import Exchange, Sent
from vfl_party.outbound.filter import Filter


class Encrypted(Filter):
    """Refuses an exchange whose gradients are not encrypted; see ``Policy``."""

    text = "encrypted gradients only"

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        if sent.kind is Kind.GRADIENT and set(sent.tensors) != {"ciphertexts"}:
            raise InputError(
                Code.REFUSED,
                f"policy: gradients of phase {phase} (exchange {exchange.name}) may leave only "
                'encrypted. Use secureboost with encryption = "paillier" or "ou", or choose '
                "another policy.",
            )
        return self


POLICY = Encrypted
