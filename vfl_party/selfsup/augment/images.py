"""Makes views of images with crops, flips, colour changes and blur."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from vfl_party.selfsup.augment.draws import draw_booleans, draw_uniform
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


# The range of sigma in pixels (SimCLR, appendix A).
SIGMA = (0.1, 2.0)


def draw_blurs(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws a sigma in pixels for each of n images, [n]. A sigma of 0 leaves an image unchanged."""
    sigma_B = draw_uniform(*SIGMA, n, generator=generator)
    return sigma_B * draw_booleans(settings.blur, n, generator=generator)


def blur(images_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Blurs each image along both axes. The kernel's size is a tenth of the image (SimCLR), at
    least 3 pixels.

    Beyond its edges the image is mirrored, as in torchvision's ``gaussian_blur``.
    """
    H, W = images_BCHW.shape[2:]
    return (
        _make_blur_matrices(H, sigma_B)[:, None]
        @ images_BCHW
        @ _make_blur_matrices(W, sigma_B)[:, None].mT
    )


def get_radius(size: int) -> int:
    """Returns the number of the kernel's pixels on each side of its middle."""
    return min(max(1, round(size / 20)), size - 1)


def _make_blur_matrices(size: int, sigma_B: Tensor) -> Tensor:
    """Returns the blur along one axis as matrices, [B, size, size]. Row i contains the weights of
    the input pixels for output pixel i.
    """
    reach = get_radius(size)
    offsets_K = torch.arange(-reach, reach + 1, device=sigma_B.device)
    # A sigma of 1e-3 does not blur.
    weights_BK = torch.softmax(-0.5 * (offsets_K / sigma_B.clamp(min=1e-3)[:, None]) ** 2, dim=1)
    # The positions of the kernel's pixels, [size, K], mirrored at the first pixel …
    places = (torch.arange(size, device=sigma_B.device)[:, None] + offsets_K).abs()
    # … and at the last pixel.
    places = torch.where(places < size, places, 2 * (size - 1) - places)
    smear = torch.zeros(len(sigma_B), size, size, device=sigma_B.device)
    where = places.expand(len(sigma_B), -1, -1)
    return smear.scatter_add_(2, where, weights_BK[:, None, :].expand_as(where))


# Applies colour jitter and grayscale with separate factors for each image.
#
# Each step maps a pixel's channels x to A x + b. Only the offset of contrast depends on the image,
# through its mean. So all steps together are one matrix and one offset for each image. Images may
# be standardised, so values are not clamped to 0..1.

# The weights of red, green and blue in torchvision and PIL.
LUMA = (0.2989, 0.587, 0.114)


# The transform from RGB to YIQ: brightness and two colour axes.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def _hue_terms() -> tuple[Tensor, Tensor]:
    """Returns matrices C and S, [3, 3] each. A rotation of the colour plane by an angle a is I +
    (cos a - 1) C + sin a S.
    """
    yiq = torch.tensor(YIQ, dtype=torch.float64)
    plane = torch.diag(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    # A positive angle rotates red towards yellow, as in HSV.
    quarter = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)
    back = torch.linalg.inv(yiq)
    return (back @ plane @ yiq).float(), (back @ quarter @ yiq).float()


HUE_COS, HUE_SIN = _hue_terms()


def draw_colours(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws the colour changes of n images, [n, 5]: factors of brightness, contrast and saturation,
    the rotation of the hue as a share of the circle, and 1 if the image becomes grey.

    An image without jitter gets 1, 1, 1, 0.
    """
    spread = torch.tensor(
        [settings.brightness, settings.contrast, settings.saturation, settings.hue]
    )
    change_B4 = draw_uniform(-1, 1, n, 4, generator=generator) * spread
    change_B4 *= draw_booleans(settings.jitter, n, 1, generator=generator)
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return torch.cat(
        [change_B4 + neutral, draw_booleans(settings.grayscale, n, 1, generator=generator)], dim=1
    )


def recolour(images_BCHW: Tensor, colour_B5: Tensor) -> Tensor:
    """Applies brightness, contrast, saturation, hue and grayscale, in this order. Applies only the
    first two unless C = 3.

    Brightness multiplies. Contrast blends with the image's mean (of its luma if C = 3), and
    saturation with the pixel's luma, like torchvision without clamping. Hue rotates the colour
    plane of YIQ, which is a linear map. torchvision uses HSV instead, which is undefined for
    standardised values.
    """
    brightness_B, contrast_B, saturation_B, hue_B, gray_B = colour_B5.unbind(dim=1)
    factor_B, base_B = brightness_B * contrast_B, brightness_B * (1 - contrast_B)
    if images_BCHW.shape[1] != 3:
        mean_B = images_BCHW.mean(dim=(1, 2, 3))
        return torch.addcmul(
            (base_B * mean_B)[:, None, None, None], images_BCHW, factor_B[:, None, None, None]
        )
    luma = torch.tensor(LUMA, device=images_BCHW.device)
    mean_B = images_BCHW.mean(dim=(2, 3)) @ luma
    mix_B33 = _desaturate(gray_B, luma) @ _rotate_hue(hue_B) @ _desaturate(1 - saturation_B, luma)
    # The offset is the same in all channels.
    offset_B31 = mix_B33.sum(dim=2, keepdim=True) * (base_B * mean_B)[:, None, None]
    colours = torch.baddbmm(offset_B31, mix_B33 * factor_B[:, None, None], images_BCHW.flatten(2))
    return colours.view_as(images_BCHW)


def _desaturate(share_B: Tensor, luma: Tensor) -> Tensor:
    """Returns matrices [B, 3, 3] that move a colour towards its grey by ``share_B``."""
    eye = torch.eye(3, device=luma.device)
    return eye + share_B[:, None, None] * (luma.expand(3, 3) - eye)


def _rotate_hue(hue_B: Tensor) -> Tensor:
    """Returns matrices [B, 3, 3] that rotate the hue by a share of the circle."""
    angle_B11 = (2 * math.pi * hue_B)[:, None, None]
    cos, sin = HUE_COS.to(hue_B.device), HUE_SIN.to(hue_B.device)
    return torch.eye(3, device=hue_B.device) + (angle_B11.cos() - 1) * cos + angle_B11.sin() * sin


# The number of boxes that are tried before the fallback, as in torchvision's RandomResizedCrop.
ATTEMPTS = 10


def draw_crops(
    n: int, height: int, width: int, settings: AugmentSettings, generator: torch.Generator
) -> Tensor:
    """Draws a box for each of n images, [n, 5]: top, left, height and width in whole pixels, and 1
    if the image is mirrored, else 0.

    Boxes have the same distribution as in torchvision's ``RandomResizedCrop``: the first of ten
    pairs of area and ratio that fits into the image, or else the middle of the image.
    """
    area = draw_uniform(*settings.crop_scale, n, ATTEMPTS, generator=generator).mul_(height * width)
    low, high = map(math.log, settings.crop_ratio)
    ratio = draw_uniform(low, high, n, ATTEMPTS, generator=generator).exp_()
    # The boxes of all attempts, [n, attempts, (height, width)].
    boxes = torch.stack([area / ratio, area * ratio], dim=2).sqrt_().round_()
    fits = ((boxes >= 1) & (boxes <= torch.tensor([height, width]))).all(dim=2)
    # The index of the first box that fits.
    first_fit = fits.int().argmax(dim=1)
    box_B2 = boxes[torch.arange(n), first_fit]
    box_B2 = torch.where(
        fits.any(dim=1, keepdim=True),
        box_B2,
        torch.tensor(_compute_middle_box(height, width, settings)),
    )
    room_B2 = torch.tensor([height, width]) - box_B2
    corner_B2 = (torch.rand(n, 2, generator=generator) * (room_B2 + 1)).floor_()
    corner_B2 = torch.where(fits.any(dim=1, keepdim=True), corner_B2, (room_B2 / 2).floor_())
    return torch.cat(
        [corner_B2, box_B2, draw_booleans(settings.flip, n, 1, generator=generator)], dim=1
    )


def crop(images_BCHW: Tensor, crop_B5: Tensor) -> Tensor:
    """Stretches each image's box to the size of the image (bilinear, no anti-aliasing), and mirrors
    it if its flag is 1.

    The result is the same as torchvision's ``resized_crop(..., antialias=False)``: no pixel outside
    the box is read.
    """
    _, _, H, W = images_BCHW.shape
    top_B, left_B, height_B, width_B, flip_B = crop_B5.unbind(dim=1)
    y_BH, x_BW = _make_positions(top_B, height_B, H), _make_positions(left_B, width_B, W)
    x_BW = torch.where(flip_B.bool()[:, None], x_BW.flip(1), x_BW)
    grid_BHW2 = torch.stack(
        [x_BW[:, None, :].expand(-1, H, W), y_BH[:, :, None].expand(-1, H, W)], dim=3
    )
    return functional.grid_sample(
        images_BCHW, grid_BHW2, padding_mode="border", align_corners=False
    )


def _make_positions(start_B: Tensor, length_B: Tensor, size: int) -> Tensor:
    """Returns the positions to read along an axis, [B, size], in the units of grid_sample, where -1
    and 1 are the image's outer edges.
    """
    centres = torch.arange(size, device=start_B.device) + 0.5
    # Positions in pixels of the box.
    inside = (centres * (length_B / size)[:, None] - 0.5).clamp_(min=0)
    inside = torch.minimum(inside, (length_B - 1)[:, None])
    return (inside + start_B[:, None] + 0.5) * (2 / size) - 1


def _compute_middle_box(height: int, width: int, settings: AugmentSettings) -> tuple[float, float]:
    """Returns the height and the width of the largest box with an allowed ratio."""
    low, high = settings.crop_ratio
    ratio = min(max(width / height, low), high)
    return float(max(1, min(height, round(width / ratio)))), float(
        max(1, min(width, round(height * ratio)))
    )
