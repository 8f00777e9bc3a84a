"""A party's encoder inputs as a table of numbers, by which attacks on columns are judged."""

from __future__ import annotations

import torch

from vfl.leak_meter.scene.scene import EncoderInputs, Image
from vfl_party.assembly.party import Assembled
from vfl_party.data.inputs.features import HIDDEN, UNKNOWN
from vfl_party.data.inputs.preprocess import Preprocessor

# Minimum height and width of an image in pixels.
_MIN_SIDE = 2


def make_inputs_table(assembled: Assembled) -> EncoderInputs | None:
    """Returns a party's encoder inputs as a table; None if it has no features."""
    features, preprocessor = assembled.party.features, assembled.prepared.preprocessor
    if features is None or preprocessor is None:
        return None
    values = features.x.flatten(1)
    numbers, groups = preprocessor.numeric_names, dict[str, range]()
    names = [*numbers]
    for column, words in zip(
        preprocessor.categorical_names, preprocessor.vocabularies, strict=True
    ):
        groups[column] = range(len(names), len(names) + 1 + len(words))
        names += [f"{column}={word}" for word in ("missing", *words)]
    if features.categories is not None:
        codes = features.categories.cpu()
        hot = torch.where(codes == UNKNOWN, -1, (codes - HIDDEN).clamp_min(0))
        return EncoderInputs(tuple(names), values, hot, groups)
    if preprocessor.image_shape is not None:
        image = _image(preprocessor)
        return EncoderInputs(
            tuple(f"x{number}" for number in range(values.shape[1])), values, image=image
        )
    return EncoderInputs(tuple(names), values, groups=groups)


def _image(preprocessor: Preprocessor) -> Image | None:
    """Returns the image format of the columns; None if an image is only a line of pixels, which
    cannot be compared by SSIM.
    """
    channels, height, width = preprocessor.image_shape or (0, 0, 0)
    if min(height, width) < _MIN_SIDE:
        return None
    return Image((channels, height, width), preprocessor.shift, preprocessor.scale)
