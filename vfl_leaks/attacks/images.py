"""Reconstructs images from embeddings with decoders trained on rows of which the active party knows
the embeddings and the images.

The attacker knows the same rows as in the attack ``columns``, and reads each exchange separately.
It uses the embeddings of the last recorded epoch, and in a second figure also the first embedding
and the mean over all epochs. Two decoders are trained: a dense decoder and, with many rows, the
convolutional decoder of model inversion (MocoSFL, appendix A.3). A fifth of the known rows decides
which decoder is used, or whether the mean of the known images is better. Images are judged by SSIM,
and by the mean squared error of pixels from 0 to 1, for which a lower value is a larger leak. The
baselines are the mean image, and the same decoders on the attacker's own columns and on shuffled
embeddings (chance).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vfl_common.text import list_names
from vfl_leaks.fitting import count_held_out, decode_pixels
from vfl_leaks.inversion import (
    InversionSettings,
    LatentPairs,
    reconstruct,
    train_decoder,
)
from vfl_leaks.pairs import ALL_THREE, Pairs, list_small_exchanges, yield_pairs
from vfl_leaks.scene import ALL_EPOCHS, Attack, Figure, Scene, Shown
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.resist import Likeness, measure_likeness

# On digits and MNIST, after 2,000 steps, the convolutional decoder had a larger error than the
# dense one with 125 to 700 known rows. With 1,200 known rows, the errors were equal and the SSIM of
# the convolutional decoder was larger (0.84, not 0.81).
_MIN_CONVOLUTIONAL, _STEPS, _BATCH = 1000, 2000, 32
_MAX_JUDGED, _MAX_DRAWN = 1000, 16
_FOUND, _CHANCE, _OWN, _MEAN = "found", "chance", "own columns", "mean image"


def play_images(scene: Scene) -> list[Figure]:
    """Returns SSIM and MSE of each sender's images. Raises UnfitError if there are no images, or
    not enough rows.
    """
    figures = []
    for pair in yield_pairs(scene, images=True):
        known, truth = _scale_images(pair)
        guesses = _decode_inputs(pair, known, len(truth), scene.seed)
        scores = {what: measure_likeness(guess.images, truth) for what, guess in guesses.items()}
        figure = Figure(
            f"{pair.sender}: images", f"{len(known)} rows", "SSIM", 0.0, place=pair.place
        )
        unlearned = guesses[_FOUND].by == _MEAN
        note = (
            f"{pair.sender}: from {pair.place} the decoders learned nothing, and return the mean "
            "image"
        )
        first, *rest = _make_figures(figure, scores)
        figures += [
            replace(
                first,
                note=note if unlearned else "",
                shown=_select_images(pair, truth, guesses, scores),
            ),
            *rest,
        ]
        if pair.over:
            z_KD, judged_ND = pair.over[ALL_THREE]
            guess = decode_images(z_KD, known, judged_ND[: len(truth)], scene.seed)
            all_epochs_scores = scores | {_FOUND: measure_likeness(guess.images, truth)}
            figures += _make_figures(
                replace(figure, knows=f"{figure.knows}, {ALL_EPOCHS}"), all_epochs_scores
            )
    small_exchanges = list_small_exchanges(scene, images=True)
    if small_exchanges:
        figures[-1] = replace(
            figures[-1],
            note=f"not played on exchanges of too few rows: {list_names(small_exchanges)}",
        )
    return figures


@dataclass(frozen=True, eq=False)
class Guess:
    """The reconstructed images of the judged rows, [N, C, H, W], and the name of the decoder."""

    images: Tensor
    by: str


def _scale_images(pair: Pairs) -> tuple[Tensor, Tensor]:
    """Returns the known and the judged images, [N, C, H, W], with pixels from 0 to 1. Pixels with
    another range are scaled by the range of the known images.
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


def _decode_inputs(pair: Pairs, known: Tensor, judged: int, seed: int) -> dict[str, Guess]:
    """Returns {name of the decoded input: the reconstructions of the judged rows}."""
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
    """Returns the images of the better of two decoders, or the mean image if it is better than
    both.

    Args:
        z_KD: the embeddings of the known rows, [K, D].
        images_KCHW: the images of the known rows, [K, C, H, W], pixels from 0 to 1.
        judged_ND: the embeddings of the judged rows, [N, D].
        seed: the seed of the decoders.
    """
    held_out = count_held_out(len(z_KD))
    inputs = torch.cat([z_KD[:held_out], judged_ND]).float()
    dense = decode_pixels(z_KD.float(), images_KCHW.flatten(1), inputs, seed)
    candidates = {
        _MEAN: images_KCHW.mean(dim=0).expand(len(inputs), -1, -1, -1),
        "dense": dense.reshape(-1, *images_KCHW.shape[1:]).clamp(0, 1),
    }
    if len(z_KD) >= _MIN_CONVOLUTIONAL:
        learnt, held_out_pairs = (
            LatentPairs(z_KD[part].float(), images_KCHW[part])
            for part in (slice(held_out, None), slice(held_out))
        )
        epochs = math.ceil(_STEPS / math.ceil(len(learnt) / _BATCH))
        settings = InversionSettings(epochs=epochs, batch_size=_BATCH, seed=seed)
        candidates["convolutional"] = reconstruct(
            train_decoder(learnt, settings, held_out=held_out_pairs), inputs
        )
    error = {
        by: functional.mse_loss(images[:held_out], images_KCHW[:held_out]).item()
        for by, images in candidates.items()
    }
    by = min(error, key=error.__getitem__)
    return Guess(candidates[by][held_out:], by)


def _make_figures(figure: Figure, scores: dict[str, Likeness]) -> list[Figure]:
    """Returns a figure of SSIM and a figure of MSE, which is a detail."""
    figures = []
    for unit, values in (
        ("SSIM", {name: score.ssim for name, score in scores.items()}),
        ("MSE", {name: score.mse for name, score in scores.items()}),
    ):
        figures.append(
            replace(
                figure,
                unit=unit,
                detail=unit == "MSE",
                value=values[_FOUND],
                chance=values[_CHANCE],
                baselines={name: values[name] for name in (_MEAN, _OWN) if name in values},
            )
        )
    return figures


def _select_images(
    pair: Pairs, truth: Tensor, guesses: dict[str, Guess], like: dict[str, Likeness]
) -> Shown:
    """Returns the first private images and their reconstructions, to be drawn."""
    names = {_FOUND: "reconstructed", _MEAN: _MEAN}
    rows = [(name, guesses[what].images[:_MAX_DRAWN].clone()) for what, name in names.items()]
    scores = [
        f"{name}: MSE {like[what].mse:.4f}, SSIM {like[what].ssim:.3f}"
        for what, name in names.items()
    ]
    return Shown(pair.sender, (("private", truth[:_MAX_DRAWN].clone()), *rows), "; ".join(scores))


IMAGES = Attack("images from embeddings", "active", play_images, "embeddings")
