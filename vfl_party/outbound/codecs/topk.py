"""Encodes float32 as the largest numbers of each row and their positions, packed. All other numbers
arrive as zero.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from vfl_common.config.base import Section
from vfl_common.packing.coders import TopK
from vfl_party.outbound.codecs import Codec, PackedCodec, Place
from vfl_party.outbound.filter import Filter


class TopKSettings(Section):
    """Settings of the codec."""

    keep: int | float
    """The numbers of a row that are sent: a count, or a share between 0 and 1, exclusive."""
    values: Literal["float32", "float16"] = "float32"
    """The type of the numbers that are sent."""

    @model_validator(mode="after")
    def _check(self) -> Any:
        share = isinstance(self.keep, float)
        if self.keep <= 0 or (share and self.keep >= 1):
            raise ValueError(
                "keep: must be a positive integer (a count of numbers per row) or a share between "
                f"0 and 1, exclusive (got {self.keep})"
            )
        return self


def _make(settings: TopKSettings, place: Place) -> Filter:
    return PackedCodec(TopK(settings.keep, half=settings.values == "float16"), place.seed)


CODEC = Codec(TopKSettings, _make)
