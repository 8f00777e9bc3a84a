"""Makes random views of a batch: two for self-supervision and one for supervised phases. Images are
cropped and recoloured, and features of tables are corrupted.

All random numbers come from a CPU generator and are then moved to the device. So views are the same
on every device, and a new generator with the same seed makes the same views. Every row has its own
random numbers (decision 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from vfl_common.config.models import NETWORKS
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.data.inputs.features import HIDDEN, Features
from vfl_party.data.inputs.made import BatchLog, BatchOrigin, DrawnView, Views
from vfl_party.models import generator
from vfl_party.phases.context import Party
from vfl_party.selfsup.settings import OF_TABLES, AugmentSettings, SupervisedAugment

# The inputs of an encoder: (x,) or (x, categories).
Inputs: TypeAlias = tuple[Tensor, ...]


def draw_uniform(low: float, high: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws a float32 tensor of ``shape``, uniform from ``low`` to ``high``."""
    return torch.rand(shape, generator=generator).mul_(high - low).add_(low)


def draw_booleans(probability: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws a boolean tensor of ``shape``. Each element is true with ``probability``."""
    return torch.rand(shape, generator=generator) < probability


class ImageAugment:
    """Makes views of images, float [B, C, H, W], standardised or not. Each image of each view has
    its own random numbers.
    """

    def __init__(self, settings: AugmentSettings) -> None:
        self._settings = settings

    def two_views(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Inputs]:
        """Returns two views; see ``Augment``."""
        x_BCHW, *rest = inputs
        return (self._make_view(x_BCHW, generator), *rest), (
            self._make_view(x_BCHW, generator),
            *rest,
        )

    def one_view(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
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


# The number of rows that are read at once to find the ranges.
_AT_ONCE = 8192


class TableAugment:
    """Replaces each number, with probability ``corruption``, by the value of its column in a random
    row of the pool.

    A replaced column keeps its distribution but loses its relation to the other columns (FedHSSL,
    section VI). Columns of one-hot categories count as numbers. A category is replaced, with the
    same probability, by the code for a hidden category.

    With ``exact_share``, the same number of features is replaced in every row: ``corruption`` times
    the number of features, rounded down, where numbers and categories count the same (SCARF,
    algorithm 1). With ``replacement = "uniform"``, numbers are drawn uniformly between the minimum
    and the maximum of their column in the pool. Both are as in FedHSSL's released code.

    features: The party's rows, [N, F]. pool_P: The row numbers of the pool, int64.
    """

    def __init__(self, settings: AugmentSettings, features: Features, pool_P: Tensor) -> None:
        self._settings = settings
        self._features = features
        self._pool_P = pool_P.cpu()
        self._range_2F = None if settings.replacement == "rows" else self._find_ranges()

    def _find_ranges(self) -> Tensor:
        """Returns the minimum and the maximum of each column in the pool, [2, F]."""
        ranges = [
            torch.stack([x_PF.amin(0), x_PF.amax(0)])
            for part_P in torch.split(self._pool_P, _AT_ONCE)
            for x_PF in self._features.inputs(part_P)[:1]
        ]
        lows_SF, highs_SF = torch.stack(ranges).unbind(1)
        return torch.stack([lows_SF.amin(0), highs_SF.amax(0)])

    def two_views(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Inputs]:
        """Returns two views; see ``Augment``."""
        first = inputs if self._settings.corrupt == "one" else self._corrupt(inputs, generator)
        return first, self._corrupt(inputs, generator)

    def one_view(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Returns one view; see ``Augment``."""
        return self._corrupt(inputs, generator)

    def _corrupt(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        x_BF, *rest = inputs
        share, device = self._settings.corruption, x_BF.device
        if self._settings.exact_share:
            masks = _draw_exact_masks(share, inputs, generator)
        else:
            # The generator expression is lazy, so the order of draws is: numbers, their
            # replacements, categories.
            masks = (draw_booleans(share, *tensor.shape, generator=generator) for tensor in inputs)
        replaced_BF = next(masks).to(device)
        view = torch.where(replaced_BF, self._draw_replacements(x_BF, generator), x_BF)
        return view, *(
            codes_BK.masked_fill(mask_BK.to(device), HIDDEN)
            for codes_BK, mask_BK in zip(rest, masks, strict=True)
        )

    def _draw_replacements(self, x_BF: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the replacements for the numbers ``x_BF``, [B, F]."""
        if self._range_2F is not None:
            low_F, high_F = self._range_2F
            even_BF = torch.rand(x_BF.shape, generator=generator).to(x_BF.device)
            return torch.lerp(low_F, high_F, even_BF)
        rows_BF = self._pool_P[torch.randint(len(self._pool_P), x_BF.shape, generator=generator)]
        return self._features.cells(rows_BF.to(x_BF.device))


def _draw_exact_masks(share: float, inputs: Inputs, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields, for each input [B, C], a mask of the features to replace. Each row has the same
    number of them.
    """
    widths = [tensor.shape[1] for tensor in inputs]
    # The small term corrects rounding: 0.29 * 100 is a little less than 29 in floating point.
    count, start = math.floor(share * sum(widths) + 1e-9), 0
    # The rank of each feature in a random order.
    ranks = torch.rand(len(inputs[0]), sum(widths), generator=generator).argsort(1).argsort(1)
    for width in widths:
        yield ranks[:, start : start + width] < count
        start += width


class Augment(Protocol):
    """Makes views of one party's rows."""

    def two_views(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Inputs]:
        """Returns two views of a batch, each of the shape of ``inputs``. ``inputs``: The result of
        ``Features.inputs(rows)``. ``generator``: A generator on the CPU.
        """

    def one_view(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Returns one view, like ``two_views``. With ``crop_scale`` = [1, 1], images are not
        cropped.
        """


class _LoggingAugment:
    """Makes views with ``augment``, and logs how they were made, for the party's other
    processes.
    """

    def __init__(self, augment: Augment, noted: BatchLog, views: Views) -> None:
        self._augment, self._batch_log, self._views = augment, noted, views

    def two_views(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Inputs]:
        drawn = generator.get_state()
        first, second = self._augment.two_views(inputs, generator)
        self._note(inputs, drawn, first, second)
        return first, second

    def one_view(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        drawn = generator.get_state()
        view = self._augment.one_view(inputs, generator)
        self._note(inputs, drawn, view)
        return view

    def _note(self, inputs: Inputs, drawn: Tensor, *views: Inputs) -> None:
        origin = self._batch_log.of(inputs)
        for which, view in enumerate(views):
            # One of two views may be the unchanged inputs, which need no entry.
            if origin is not None and view[0] is not inputs[0]:
                drawn_view = DrawnView(self._views, drawn, which, len(views))
                self._batch_log.note(view, BatchOrigin(origin.rows, view=drawn_view))


def make_augment(
    settings: AugmentSettings, features: Features, pool_rows: Tensor | npt.NDArray[np.int64]
) -> Augment:
    """Makes the augmentation for a party's inputs: crops and colours for images [N, C, H, W],
    corruption for columns [N, F] (also flattened images).

    ``pool_rows``: The party's own training rows, from which corruption takes replacement values.
    """
    augment: Augment
    if len(features.spec.shape) == 3:
        augment = ImageAugment(settings)
    else:
        augment = TableAugment(settings, features, torch.as_tensor(pool_rows))
    if features.noted is None:
        return augment
    views = Views(settings.model_dump_json(), np.asarray(pool_rows))
    return _LoggingAugment(augment, features.noted, views)


class BatchViews:
    """Makes the inputs of a party's encoder for training batches, with random changes.

    The random numbers of a batch are derived from the party's own seed, the phase and the batch's
    place in the phase. So there is no state to save, and a resumed run makes the same views. Raises
    InputError if ``settings`` do not apply to this party's rows.
    """

    def __init__(self, party: Party, phase: str, settings: SupervisedAugment) -> None:
        self._party, self._phase = party, phase
        self._augment: Augment | None = None
        where = f"recipe: phases: {phase}: augment"
        with_features = [member.name for member in party.recipe.parties if member.features]
        unknown = next((name for name in settings.parties if name not in with_features), None)
        if unknown is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}.parties: {unknown!r} is not a party with features. Choose from "
                f"{', '.join(with_features)}.",
            )
        features = party.rows.features
        if features is None or party.name not in (settings.parties or with_features):
            return
        check_keys(party, phase, settings)
        images = len(features.spec.shape) == 3
        if not (settings.of_images if images else settings.corruption):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: corruption does not apply to the images of {party.name}. Name the "
                "parties whose rows are changed in augment.parties."
                if images
                else f"{where}: crops and colours do not apply to the columns of {party.name}. "
                "Name the parties whose rows are changed in augment.parties.",
            )
        self._augment = make_augment(settings.view(), features, party.rows.get("train"))

    def inputs(self, rows: Rows, *place: int) -> Inputs:
        """Returns the encoder's arguments for a batch, [B, …]. ``place``: Numbers that identify the
        batch in the phase.
        """
        party = self._party
        inputs = party.rows.need_features().inputs(rows)
        if self._augment is None:
            return inputs
        seed = derive_seed(party.own_seed, "augment", self._phase, party.name, *place)
        return self._augment.one_view(inputs, generator(seed))


# {kind of encoder: {whether it takes images}}. An unknown kind takes both images and columns.
_IMAGES = ("cnn", "cnn0", "cnn1", *NETWORKS)
_INPUT_KINDS = {**{kind: {True} for kind in _IMAGES}, "mlp": {False}, "tabular": {False}}


def check_keys(party: Party, phase: str, settings: AugmentSettings | SupervisedAugment) -> None:
    """Raises InputError if ``settings`` contain a key for images but no encoder takes images, or a
    key for tables but all encoders take images. Considers only parties whose rows are changed.
    """
    names = settings.parties if isinstance(settings, SupervisedAugment) else ()
    kinds: set[bool] = set()
    for member in party.recipe.parties:
        if not member.features or (names and member.name not in names):
            continue
        if member.name == party.name and party.rows.features is not None:
            kinds.add(len(party.rows.features.spec.shape) == 3)
        else:
            encoder = member.encoder or party.recipe.model.encoder
            kinds |= _INPUT_KINDS.get(encoder.kind, {True, False})
    for key in sorted(settings.model_fields_set - {"parties"}):
        images = key not in OF_TABLES
        if kinds and images not in kinds:
            needed, available = ("images", "columns") if images else ("tables", "images")
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: augment: {key} is for {needed}, but the encoders of the "
                f"recipe take {available}. Remove {key}, or name a party in augment.parties whose "
                f"encoder takes {needed}.",
            )
