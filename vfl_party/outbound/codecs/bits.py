"""Encodes float32 with 8, 4 or 2 bits per number, packed, and with a minimum and a step for each
row.
"""

from __future__ import annotations

from typing import Literal

from vfl_common.config.base import Section
from vfl_common.errors import Code, InputError
from vfl_common.packing.coders import Bits
from vfl_party.outbound.codecs import Codec, FeedbackCodec, PackedCodec, Place
from vfl_party.outbound.filter import Filter


class BitsSettings(Section):
    """Settings of the codec."""

    bits: Literal[8, 4, 2]
    """The number of bits per number."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """``stochastic`` rounding is unbiased; ``nearest`` halves the maximum error."""
    scales: Literal["float32", "bfloat16"] = "float32"
    """The type of each row's minimum and step."""
    error_feedback: bool = False
    """Whether rounding errors are added to the next message. Only for weights that parties send to
    the server for averaging.
    """


def _make(settings: BitsSettings, place: Place) -> Filter:
    coder = Bits(settings.bits, settings.rounding == "stochastic", settings.scales == "bfloat16")
    if not settings.error_feedback:
        return PackedCodec(coder, place.seed)
    if not place.averaged:
        raise InputError(
            Code.CONFIG_INVALID,
            "error_feedback requires an exchange that the server averages, because other "
            "exchanges send different rows at each step. Remove error_feedback.",
        )
    if not place.up:
        raise InputError(
            Code.CONFIG_INVALID,
            "error_feedback applies only to what the parties send; the server keeps no state of "
            'an average. Set direction = "up" in the table.',
        )
    return FeedbackCodec(coder, place.seed)


CODEC = Codec(BitsSettings, _make)
