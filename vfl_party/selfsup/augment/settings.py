"""Settings of the two views that self-supervision makes of a party's rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class AugmentSettings(Section):
    """Views of images and of tables; the defaults for images are SimSiam's for small ones (without
    blur).

    ``crop_scale``: the crop's share of the image's area, drawn evenly; ``crop_ratio``: its width /
    height, drawn evenly on a log scale. ``flip``, ``jitter``, ``grayscale``, ``blur``: the
    probability of each. A jitter draws factors of ``brightness``, ``contrast`` and ``saturation``
    from 1 ± the value, and turns the hue by at most ``hue`` of a full circle. Saturation, hue and
    grayscale need images of three channels.

    ``corruption``: the probability that a table's feature is replaced; ``corrupt``: in both views
    (the papers), or in one of them (FedHSSL's released code).
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: Share = 0.5
    jitter: Share = 0.8
    brightness: Share = 0.4
    contrast: Share = 0.4
    saturation: Share = 0.4
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    grayscale: Share = 0.2
    blur: Share = 0.0
    corruption: Share = 0.3
    corrupt: Literal["both", "one"] = "both"

    def model_post_init(self, _context: Any) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale = [{low}, {high}]: give shares of the area, 0 < lowest <= highest <= 1"
            )
        low, high = self.crop_ratio
        if not 0.01 <= low <= high <= 100:
            raise ValueError(
                f"crop_ratio = [{low}, {high}]: give widths by heights, 0.01 <= lowest <= "
                "highest <= 100"
            )
