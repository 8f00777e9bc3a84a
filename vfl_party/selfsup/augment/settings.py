"""Defines the settings for the two views of a row in self-supervision and for the one view in
supervised training.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.recipe_tables import Name

# The keys that apply to tables; all others apply to images.
OF_TABLES = frozenset({"corruption", "corrupt", "replacement", "exact_share"})

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class AugmentSettings(Section):
    """Settings for views of images and of tables. The defaults for images are SimSiam's for small
    images (without blur). The area of a crop is drawn uniformly, and its ratio uniformly on a log
    scale.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    """The minimum and the maximum area of a crop, as shares of the image's area."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the largest width / height of a crop."""
    flip: Share = 0.5
    """The probability that an image is mirrored."""
    jitter: Share = 0.8
    """The probability that an image's colours change."""
    brightness: Share = 0.4
    """A jitter's factor of brightness is drawn from 1 ± this."""
    contrast: Share = 0.4
    """A jitter's factor of contrast is drawn from 1 ± this."""
    saturation: Share = 0.4
    """A jitter's factor of saturation is drawn from 1 ± this; three channels."""
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """The most by which a jitter turns the hue, as a share of the full circle; three channels."""
    grayscale: Share = 0.2
    """The probability that an image becomes grey; three channels."""
    blur: Share = 0.0
    """The probability that an image is blurred."""
    corruption: Share = 0.3
    """Tables: the probability that a feature is replaced by another row's."""
    corrupt: Literal["both", "one"] = "both"
    """Tables: whether features are replaced in both views (the papers) or in one view (FedHSSL's
    released code).
    """
    replacement: Literal["rows", "uniform"] = "rows"
    """Tables: the replacement of a number: the value of another row, or a number drawn uniformly
    between the column's minimum and maximum. Default: ``rows``, with preset ``released``
    ``uniform``.
    """
    exact_share: bool = False
    """Tables: whether exactly the share ``corruption`` of each row's features is replaced, rounded
    down, instead of this share on average. Default: false, with preset ``released`` true.
    """

    def model_post_init(self, _context: Any) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                "crop_scale must be two shares of the area with 0 < lowest <= highest <= 1 (got "
                f"[{low}, {high}]). Correct crop_scale."
            )
        low, high = self.crop_ratio
        if not 0.01 <= low <= high <= 100:
            raise ValueError(
                "crop_ratio must be two ratios of width to height with 0.01 <= lowest <= highest "
                f"<= 100 (got [{low}, {high}]). Correct crop_ratio."
            )


class SupervisedAugment(Section):
    """Settings for random changes of the rows of each training batch. By default, nothing is
    changed. Images and tables have the keys of ``AugmentSettings``.
    """

    parties: tuple[Name, ...] = ()
    """The parties whose rows are changed. Default: all parties with features."""
    crop_scale: tuple[float, float] = (1.0, 1.0)
    """The minimum and the maximum area of a crop, as shares of the image's area. By default, images
    are not cropped.
    """
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the largest width / height of a crop."""
    flip: Share = 0.0
    """The probability that an image is mirrored."""
    jitter: Share = 0.0
    """The probability that an image's colours change."""
    brightness: Share = 0.4
    """A jitter's factor of brightness is drawn from 1 ± this."""
    contrast: Share = 0.4
    """A jitter's factor of contrast is drawn from 1 ± this."""
    saturation: Share = 0.4
    """A jitter's factor of saturation is drawn from 1 ± this; three channels."""
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """The most by which a jitter turns the hue, as a share of the full circle; three channels."""
    grayscale: Share = 0.0
    """The probability that an image becomes grey; three channels."""
    blur: Share = 0.0
    """The probability that an image is blurred."""
    corruption: Share = 0.0
    """Tables: the probability that a feature is replaced by another row's."""

    def model_post_init(self, _context: Any) -> None:
        # Making the settings of a view checks the values for crops.
        self.view()
        if not (self.of_images or self.corruption):
            raise ValueError(
                "augment changes nothing. Set crop_scale, flip, jitter, grayscale or blur for "
                "images, or corruption for tables."
            )

    @property
    def of_images(self) -> bool:
        """Whether the settings change images."""
        crops = self.crop_scale != (1.0, 1.0)
        return bool(crops or self.flip or self.jitter or self.grayscale or self.blur)

    def view(self) -> AugmentSettings:
        """Returns the settings of one view. Raises ValueError if a crop cannot be made."""
        return AugmentSettings(**self.model_dump(exclude={"parties"}))
