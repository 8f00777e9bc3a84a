"""The model inversion attack (MocoSFL, appendix A.3): a decoder that learns to invert a party's
bottom model.

The attacker is an honest-but-curious server. It knows pairs of latents and auxiliary images, which
are not the party's. For example, it queries the bottom model with its own images. It trains a
decoder on these pairs. The decoder then reconstructs the party's private images from their latents.
The functions here take pairs, not a bottom model.
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

from vfl_common.errors import Code, InputError
from vfl_leaks.fitting import AdamDescent
from vfl_party.base.seeds import batches, derive_seed
from vfl_party.methods.mocosfl.resist import Likeness, measure_likeness
from vfl_party.models import seed_torch
from vfl_party.models.halves import Decoder

CPU = torch.device("cpu")
# Maximum number of auxiliary images: as many as the paper's attacker may query.
MAX_IMAGES = 10_000
# Number of the party's images on which the attack is measured.
PRIVATE_IMAGES = 128
# Batch size of decoding.
_AT_ONCE = 256

# Called after each epoch with its number, the number of all epochs, and the mean squared error.
Progress = Callable[[int, int, float], None]


def _ignore_progress(_done: int, _epochs: int, _mse: float) -> None: ...


@dataclass(frozen=True)
class InversionSettings:
    """The settings with which the attacker trains its decoder, by Adam on the mean squared error.
    ``lr``: the learning rate.
    """

    epochs: int = 50
    batch_size: int = 32
    lr: float = 1e-3
    seed: int = 1


@dataclass(frozen=True, eq=False)
class LatentPairs:
    """Latents and the images that they were computed from.

    ``z``: [N, C, H, W] or [N, D]. ``images``: [N, C, H, W], pixels from 0 to 1. Raises ValueError
    for other shapes or pixels.
    """

    z: Tensor
    images: Tensor

    def __post_init__(self) -> None:
        if self.z.dim() not in (2, 4) or self.images.dim() != 4 or len(self.z) != len(self.images):
            shapes = f"{list(self.z.shape)} and {list(self.images.shape)}"
            raise ValueError(
                "latents must be [N, C, H, W] or [N, D] and images [N, C, H, W] with the same N "
                f"(got {shapes})"
            )
        low, high = (
            torch.aminmax(self.images)
            if len(self.images)
            else (torch.tensor(0.0), torch.tensor(1.0))
        )
        if not (0.0 <= low.item() <= high.item() <= 1.0):
            raise ValueError("pixels of images must be from 0 to 1; scale them")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def latent(self) -> tuple[int, ...]:
        """The shape of a latent: C, H and W, or the width of a vector."""
        return tuple(self.z.shape[1:])

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape of an image: C, H and W."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width


@dataclass(frozen=True, eq=False)
class Inverted:
    """The result of the attack on a party's private images. A larger error means better privacy.

    ``truth``, ``images``: the private images and their reconstructions, [N, C, H, W]. ``found``:
    the similarity of ``images`` to ``truth``. ``baseline``: the similarity of the mean auxiliary
    image to ``truth``; an attacker needs no latents for it. ``trained_mse``: the decoder's error on
    the auxiliary images in the last epoch.
    """

    truth: Tensor
    images: Tensor
    found: Likeness
    baseline: Likeness
    trained_mse: float

    @property
    def failed(self) -> bool:
        """Whether the reconstructions are worse than the mean image. Then the attack shows nothing
        about the privacy of the latents.
        """
        return self.found.mse > self.baseline.mse


def invert(
    auxiliary: LatentPairs,
    private: LatentPairs,
    settings: InversionSettings,
    *,
    device: torch.device = CPU,
    progress: Progress = _ignore_progress,
) -> Inverted:
    """Trains a decoder on the attacker's pairs, and measures it on the party's private pairs.

    On a CPU, the result is the same each time with the same number of threads. Raises InputError:
    see ``train_decoder``.
    """
    losses = [math.nan]

    def record_loss(done: int, epochs: int, mse: float) -> None:
        losses.append(mse)
        progress(done, epochs, mse)

    decoder = train_decoder(auxiliary, settings, device=device, progress=record_loss)
    images = reconstruct(decoder, private.z)
    mean = auxiliary.images.cpu().mean(dim=0, keepdim=True).expand_as(private.images)
    result, baseline = (
        measure_likeness(images, private.images),
        measure_likeness(mean, private.images),
    )
    return Inverted(private.images.cpu(), images, result, baseline, losses[-1])


def train_decoder(
    pairs: LatentPairs,
    settings: InversionSettings,
    *,
    held_out: LatentPairs | None = None,
    device: torch.device = CPU,
    progress: Progress = _ignore_progress,
) -> Decoder:
    """Returns a decoder in evaluation mode that was trained on pairs.

    ``held_out``: pairs that are not trained on; the returned decoder is from the epoch with the
    smallest error on these pairs. Raises InputError if there are fewer than two pairs (BatchNorm
    needs two), or if the training diverges.
    """
    if len(pairs) < 2:
        raise InputError(
            Code.DATA_INVALID,
            f"auxiliary images: must be at least 2 (got {len(pairs)}). Give more images.",
        )
    with seed_torch(derive_seed(settings.seed, "init", "decoder")):
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
            raise InputError(
                Code.NON_FINITE,
                f"decoder: training diverged in epoch {epoch + 1} (got error {mse}). Set a lower "
                "learning rate.",
            )
        progress(epoch + 1, settings.epochs, mse)
        if held_out is not None and (error := _compute_error(decoder, held_out)) < best:
            best, best_state = error, copy.deepcopy(decoder.state_dict())
    if best_state is not None:
        decoder.load_state_dict(best_state)
    return decoder.eval()


def _compute_error(decoder: Decoder, held_out: LatentPairs) -> float:
    decoder.eval()
    error = functional.mse_loss(reconstruct(decoder, held_out.z), held_out.images.cpu()).item()
    decoder.train()
    return error


@torch.no_grad()
def reconstruct(decoder: Decoder, z: Tensor) -> Tensor:
    """Returns the images that a decoder reconstructs, [N, C, H, W], on the CPU.

    Args:
        decoder: the decoder, in evaluation mode.
        z: latents, [N, C, H, W] or [N, D].
    """
    device = next(decoder.parameters()).device
    return torch.cat([decoder(part.to(device)).cpu() for part in z.split(_AT_ONCE)])  # type: ignore[no-untyped-call]
