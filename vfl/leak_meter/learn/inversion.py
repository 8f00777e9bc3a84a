"""The model inversion attack (MocoSFL, appendix A.3): a decoder that has learnt to undo a party's
bottom.

The attacker is an honest-but-curious server. It knows pairs of latents and images that are not the
party's: it may query the bottom with images of its own, or have them from elsewhere. What it learns
from them undoes the latents of the party's private images. The functions here take pairs, and no
bottom.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vfl.leak_meter.learn.fitting import AdamDescent
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import batches, derive_seed
from vfl_party.methods.mocosfl.likeness import Likeness, likeness
from vfl_party.models import seeded
from vfl_party.models.decoder import Decoder

CPU = torch.device("cpu")
# Auxiliary ones: as many as the paper's attacker may query.
MAX_IMAGES = 10_000
# Of the party, on which the attack is measured.
PRIVATE_IMAGES = 128
# Latents that are decoded at once.
_AT_ONCE = 256

# Epochs done, of how many, mean squared error of the last one.
Progress = Callable[[int, int, float], None]


def _quiet(_done: int, _epochs: int, _mse: float) -> None: ...


@dataclass(frozen=True)
class InversionSettings:
    """How the attacker trains its decoder: Adam with the learning rate ``lr``, on the mean squared
    error.
    """

    epochs: int = 50
    batch_size: int = 32
    lr: float = 1e-3
    seed: int = 1


@dataclass(frozen=True, eq=False)
class LatentPairs:
    """Latents and the images that they were made of.

    ``z``: [N, C, H, W] or [N, D]. ``images``: [N, C, H, W], pixels from 0 to 1. Raises ValueError
    if they are no pairs.
    """

    z: Tensor
    images: Tensor

    def __post_init__(self) -> None:
        if self.z.dim() not in (2, 4) or self.images.dim() != 4 or len(self.z) != len(self.images):
            shapes = f"{list(self.z.shape)} and {list(self.images.shape)}"
            raise ValueError(
                f"latents and images are {shapes}; give [N, C, H, W] or [N, D], and as many "
                "[N, C, H, W]"
            )
        low, high = (
            torch.aminmax(self.images)
            if len(self.images)
            else (torch.tensor(0.0), torch.tensor(1.0))
        )
        if not (0.0 <= low.item() <= high.item() <= 1.0):
            raise ValueError("the images have pixels that are not from 0 to 1; scale them")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def latent(self) -> tuple[int, ...]:
        """C, H and W of a latent, or the width of a vector."""
        return tuple(self.z.shape[1:])

    @property
    def image(self) -> tuple[int, int, int]:
        """C, H and W of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width


@dataclass(frozen=True, eq=False)
class Inverted:
    """What the attack has found of a party's private images. A larger error means better privacy.

    ``truth``, ``images``: the private images and their reconstructions, [N, C, H, W]. ``found``:
    how like they are. ``baseline``: how like the mean auxiliary image is, which an attacker has
    without any latent. ``trained_mse``: the decoder's error on the auxiliary images, in its last
    epoch of training.
    """

    truth: Tensor
    images: Tensor
    found: Likeness
    baseline: Likeness
    trained_mse: float

    @property
    def failed(self) -> bool:
        """Whether the reconstructions are worse than the mean image, so that they show nothing
        about the latents.
        """
        return self.found.mse > self.baseline.mse


def invert(
    auxiliary: LatentPairs,
    private: LatentPairs,
    settings: InversionSettings,
    *,
    device: torch.device = CPU,
    progress: Progress = _quiet,
) -> Inverted:
    """Trains a decoder on the attacker's pairs, and measures it on the party's.

    On a CPU, the result is the same each time with the same number of threads. Raises InputError as
    ``train_decoder``.
    """
    losses = [math.nan]

    def note(done: int, epochs: int, mse: float) -> None:
        losses.append(mse)
        progress(done, epochs, mse)

    decoder = train_decoder(auxiliary, settings, device=device, progress=note)
    images = reconstruct(decoder, private.z)
    mean = auxiliary.images.cpu().mean(dim=0, keepdim=True).expand_as(private.images)
    result, baseline = likeness(images, private.images), likeness(mean, private.images)
    return Inverted(private.images.cpu(), images, result, baseline, losses[-1])


def train_decoder(
    pairs: LatentPairs,
    settings: InversionSettings,
    *,
    held: LatentPairs | None = None,
    device: torch.device = CPU,
    progress: Progress = _quiet,
) -> Decoder:
    """Returns a decoder in evaluation mode that was trained on pairs.

    ``held``: other pairs; of all epochs, the decoder is kept that had the least error on them.
    Raises InputError if there are fewer than two pairs (BatchNorm needs two), or if the training
    diverges.
    """
    if len(pairs) < 2:
        text = f"the attack has {len(pairs)} auxiliary images, and needs at least 2"
        raise InputError(Code.DATA_INVALID, f"{text}; give more")
    with seeded(derive_seed(settings.seed, "init", "decoder")):
        decoder = Decoder(pairs.latent, pairs.image)
    decoder.to(device).train()
    descent = AdamDescent(decoder.parameters(), settings.lr)
    z, images = pairs.z.to(device), pairs.images.to(device)
    all_rows = np.arange(len(pairs), dtype=np.int64)
    best, best_state = math.inf, None
    for epoch in range(settings.epochs):
        total, count = torch.zeros((), device=device), 0
        for rows_B in batches(
            settings.seed, "inversion", epoch, all_rows, max(2, settings.batch_size)
        ):
            rows = torch.from_numpy(rows_B).to(device)
            loss = functional.mse_loss(decoder(z[rows]), images[rows])
            descent.step(loss)
            total += loss.detach() * len(rows)
            count += len(rows)
        mse = total.item() / count
        if not math.isfinite(mse):
            text = f"the decoder's error is {mse} after epoch {epoch + 1}: its training diverged"
            raise InputError(Code.NON_FINITE, f"{text}; take a lower learning rate")
        progress(epoch + 1, settings.epochs, mse)
        if held is not None and (error := _error(decoder, held)) < best:
            best, best_state = error, copy.deepcopy(decoder.state_dict())
    if best_state is not None:
        decoder.load_state_dict(best_state)
    return decoder.eval()


def _error(decoder: Decoder, held: LatentPairs) -> float:
    decoder.eval()
    error = functional.mse_loss(reconstruct(decoder, held.z), held.images.cpu()).item()
    decoder.train()
    return error


@torch.no_grad()
def reconstruct(decoder: Decoder, z: Tensor) -> Tensor:
    """Returns the images [N, C, H, W] that a decoder makes of latents, on the CPU."""
    device = next(decoder.parameters()).device
    return torch.cat([decoder(part.to(device)).cpu() for part in z.split(_AT_ONCE)])  # type: ignore[no-untyped-call]
