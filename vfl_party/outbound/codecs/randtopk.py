"""Encodes float32 like ``topk``, but draws some of the sent numbers at random from the smaller ones
(IJCAI 2023, arXiv 2305.18469).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vfl_common.packing.coders import TopK
from vfl_party.outbound.codecs import Codec, PackedCodec, Place
from vfl_party.outbound.codecs.topk import TopKSettings
from vfl_party.outbound.filter import Filter


class RandTopKSettings(TopKSettings):
    """Settings of the codec. In an exchange without an answer, such as validation, the codec sends
    only the largest numbers.
    """

    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The probability, in training, that a sent number is drawn from the numbers that are not among
    the largest.
    """


def _make(settings: RandTopKSettings, place: Place) -> Filter:
    alpha = settings.alpha if place.answered else 0.0
    return PackedCodec(TopK(settings.keep, alpha, settings.values == "float16"), place.seed)


CODEC = Codec(RandTopKSettings, _make)
