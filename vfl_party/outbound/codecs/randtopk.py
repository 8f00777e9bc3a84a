"""As ``topk``, but some of the numbers that are kept are drawn from the others (IJCAI 2023, arXiv
2305.18469).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vfl_common.packing.coders import TopK
from vfl_party.outbound.codecs import Codec, PackedCodec, Place
from vfl_party.outbound.codecs.topk import TopKSettings
from vfl_party.outbound.filter import Filter


class RandTopKSettings(TopKSettings):
    """Settings of the codec. An exchange without an answer, such as that of validation, sends the
    largest numbers.
    """

    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The probability that a sent number is drawn from those that are not among the largest, in
    training.
    """


def _make(settings: RandTopKSettings, place: Place) -> Filter:
    alpha = settings.alpha if place.answered else 0.0
    return PackedCodec(TopK(settings.keep, alpha, settings.values == "float16"), place.seed)


CODEC = Codec(RandTopKSettings, _make)
