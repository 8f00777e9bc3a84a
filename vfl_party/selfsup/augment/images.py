"""Makes views of images with crops, flips, colour changes and blur."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.selfsup.augment.blur import blur, draw_blurs
from vfl_party.selfsup.augment.colour import draw_colours, recolour
from vfl_party.selfsup.augment.crop import crop, draw_crops
from vfl_party.selfsup.augment.draws import draw_booleans
from vfl_party.selfsup.augment.settings import AugmentSettings


class ImageAugment:
    """Makes views of images, float [B, C, H, W], standardised or not. Each image of each view has
    its own random numbers.
    """

    def __init__(self, settings: AugmentSettings) -> None:
        self._settings = settings

    def two_views(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns two views; see ``Augment``."""
        x_BCHW, *rest = inputs
        return (self._make_view(x_BCHW, generator), *rest), (
            self._make_view(x_BCHW, generator),
            *rest,
        )

    def one_view(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        """Returns one view; see ``Augment``."""
        x_BCHW, *rest = inputs
        if self._settings.crop_scale != (1.0, 1.0):
            return self._make_view(x_BCHW, generator), *rest
        # The whole image is not drawn as a crop, because its ratio may be out of the allowed range.
        mirrored_B = draw_booleans(self._settings.flip, len(x_BCHW), 1, 1, 1, generator=generator)
        view = torch.where(mirrored_B.to(x_BCHW.device), x_BCHW.flip(3), x_BCHW)
        return self._change_colours(view, generator), *rest

    def _make_view(self, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        B, _, H, W = x_BCHW.shape
        boxes = draw_crops(B, H, W, self._settings, generator).to(x_BCHW.device)
        return self._change_colours(crop(x_BCHW, boxes), generator)

    def _change_colours(self, view: Tensor, generator: torch.Generator) -> Tensor:
        settings, device, (B, C, _, _) = self._settings, view.device, view.shape
        if settings.jitter or (settings.grayscale and C == 3):
            view = recolour(view, draw_colours(B, settings, generator).to(device))
        if settings.blur:
            view = blur(view, draw_blurs(B, settings, generator).to(device))
        return view
