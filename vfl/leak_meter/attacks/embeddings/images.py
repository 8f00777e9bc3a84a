"""Reconstructs images from embeddings with decoders trained on rows of which the active party knows
both.

The attacker knows as many rows as in ``columns``, drawn in the same way, and reads each exchange
separately: the embeddings of the last recorded epoch, then the first, the last and the mean of all
epochs. Two decoders are trained: a dense one and, with many rows, the convolutional one of model
inversion (MocoSFL, appendix A.3). A fifth of the known rows decides which of them is used, or
whether the mean of the known images is better than both. Images are judged by SSIM, and by the mean
squared error of pixels from 0 to 1, of which a lower value is a larger leak. The baselines are the
mean image, and the same decoders on the attacker's own columns and on shuffled embeddings (chance).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vfl.leak_meter.learn.fitting import count_held, decode_pixels
from vfl.leak_meter.learn.inversion import (
    InversionSettings,
    LatentPairs,
    reconstruct,
    train_decoder,
)
from vfl.leak_meter.scene.pairs import ALL_THREE, Pairs, exchanges_left_out, pairs
from vfl.leak_meter.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, Shown
from vfl_common.text import list_names
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.likeness import Likeness, likeness

# On digits and MNIST the convolutional decoder had more error than the dense one with 125 to 700
# known rows, and with 1,200 as much at a larger SSIM (0.84 to 0.81), after 2,000 steps.
_MIN_CONVOLUTIONAL, _STEPS, _BATCH = 1000, 2000, 32
_MAX_JUDGED, _MAX_DRAWN = 1000, 16
_FOUND, _CHANCE, _OWN, _MEAN = "found", "chance", "own columns", "mean image"


def play(scene: Scene) -> list[Figure]:
    """Returns SSIM and MSE of each sender's images. Raises UnfitError without images, or without
    enough rows.
    """
    figures = []
    for pair in pairs(scene, images=True):
        known, truth = _images(pair)
        guesses = _guesses(pair, known, len(truth), scene.seed)
        like = {what: likeness(guess.images, truth) for what, guess in guesses.items()}
        figure = Figure(
            f"{pair.sender}: images", f"{len(known)} rows", "SSIM", 0.0, place=pair.place
        )
        nothing = guesses[_FOUND].by == _MEAN
        note = (
            f"{pair.sender}: from {pair.place} the decoders learned nothing, and return the mean "
            "image"
        )
        first, *rest = _figures(figure, like)
        figures += [
            replace(
                first,
                note=note if nothing else "",
                shown=_images_to_draw(pair, truth, guesses, like),
            ),
            *rest,
        ]
        if pair.over:
            z_KD, judged_ND = pair.over[ALL_THREE]
            guess = decode_images(z_KD, known, judged_ND[: len(truth)], scene.seed)
            over = like | {_FOUND: likeness(guess.images, truth)}
            figures += _figures(replace(figure, knows=f"{figure.knows}, {ALL_EPOCHS}"), over)
    few = exchanges_left_out(scene, images=True)
    if few:
        figures[-1] = replace(
            figures[-1], note=f"not played on exchanges of too few rows: {list_names(few)}"
        )
    return figures


@dataclass(frozen=True, eq=False)
class Guess:
    """Images of the judged rows, [N, C, H, W], and the name of the decoder."""

    images: Tensor
    by: str


def _images(pair: Pairs) -> tuple[Tensor, Tensor]:
    """Returns the known images and those to judge, [N, C, H, W] from 0 to 1: other pixels by the
    known ones' range.
    """
    assert pair.image is not None  # noqa: S101 - the pairs are of images
    known, truth = (
        pair.image.pixels(values)
        for values in (pair.values_known, pair.values_judged[:_MAX_JUDGED])
    )
    low, high = (value.item() for value in torch.aminmax(known))
    # Tolerance for rounding of pixels that were scaled and are scaled back.
    slack = 1e-4
    if low < -slack or high > 1 + slack:
        known, truth = ((pixels - low) / max(high - low, 1e-30) for pixels in (known, truth))
    return known.clamp(0, 1), truth.clamp(0, 1)


def _guesses(pair: Pairs, known: Tensor, judged: int, seed: int) -> dict[str, Guess]:
    """Returns {what is decoded: what it gives for the judged rows}."""
    drawn = torch.Generator().manual_seed(derive_seed(seed, "shuffled embeddings") % 2**63)
    shuffled = pair.z_known[torch.randperm(len(known), generator=drawn)]
    guesses = {
        _FOUND: decode_images(pair.z_known, known, pair.z_judged[:judged], seed),
        _CHANCE: decode_images(shuffled, known, pair.z_judged[:judged], seed),
        _MEAN: Guess(known.mean(dim=0).expand(judged, -1, -1, -1), _MEAN),
    }
    if pair.own is not None:
        guesses[_OWN] = decode_images(pair.own[0], known, pair.own[1][:judged], seed)
    return guesses


def decode_images(z_KD: Tensor, images_KCHW: Tensor, judged_ND: Tensor, seed: int) -> Guess:
    """Returns the images of the better of two decoders, or the mean image if that is better.

    Args:
        z_KD: the embeddings of the known rows, [K, D].
        images_KCHW: their images, [K, C, H, W], pixels from 0 to 1.
        judged_ND: the embeddings of the judged rows, [N, D].
        seed: the seed of the decoders.
    """
    held = count_held(len(z_KD))
    asked = torch.cat([z_KD[:held], judged_ND]).float()
    dense = decode_pixels(z_KD.float(), images_KCHW.flatten(1), asked, seed)
    made = {
        _MEAN: images_KCHW.mean(dim=0).expand(len(asked), -1, -1, -1),
        "dense": dense.reshape(-1, *images_KCHW.shape[1:]).clamp(0, 1),
    }
    if len(z_KD) >= _MIN_CONVOLUTIONAL:
        learnt, decides = (
            LatentPairs(z_KD[at].float(), images_KCHW[at])
            for at in (slice(held, None), slice(held))
        )
        epochs = math.ceil(_STEPS / math.ceil(len(learnt) / _BATCH))
        settings = InversionSettings(epochs=epochs, batch_size=_BATCH, seed=seed)
        made["convolutional"] = reconstruct(train_decoder(learnt, settings, held=decides), asked)
    error = {
        by: functional.mse_loss(images[:held], images_KCHW[:held]).item()
        for by, images in made.items()
    }
    by = min(error, key=error.__getitem__)
    return Guess(made[by][held:], by)


def _figures(figure: Figure, like: dict[str, Likeness]) -> list[Figure]:
    """Returns SSIM, and MSE as its detail."""
    figures = []
    for unit, values in (
        ("SSIM", {w: own.ssim for w, own in like.items()}),
        ("MSE", {w: own.mse for w, own in like.items()}),
    ):
        baselines = {what: values[what] for what in (_MEAN, _OWN) if what in values}
        of = replace(figure, unit=unit, detail=unit == "MSE")
        figures.append(
            replace(of, value=values[_FOUND], chance=values[_CHANCE], baselines=baselines)
        )
    return figures


def _images_to_draw(
    pair: Pairs, truth: Tensor, guesses: dict[str, Guess], like: dict[str, Likeness]
) -> Shown:
    """Returns the first images, to be drawn."""
    names = {_FOUND: "reconstructed", _MEAN: _MEAN}
    rows = [(name, guesses[what].images[:_MAX_DRAWN].clone()) for what, name in names.items()]
    scores = [
        f"{name}: MSE {like[what].mse:.4f}, SSIM {like[what].ssim:.3f}"
        for what, name in names.items()
    ]
    return Shown(pair.sender, (("private", truth[:_MAX_DRAWN].clone()), *rows), "; ".join(scores))


ATTACK = Attack("images from embeddings", "active", play, "embeddings")
