"""MixMatch: a head and an encoder learn from a few labelled rows and many without labels.

Berthelot et al., NeurIPS 2019, as Fu et al. use it for model completion (USENIX Security 2022). A
step takes B rows of each kind. The model's own guess for a row without a label, sharpened, is its
target: q_c = p_c^(1/T) / Σ p^(1/T). All 2B rows and targets are mixed with the same in another
order: x = l·x_i + (1 − l)·x_j, with l = max(b, 1 − b) and b ~ Beta(α, α). The loss is the
cross-entropy of the first B rows, and λ·t times the mean squared error of the others'
probabilities, where t grows from 0 to 1. Rows are not augmented, so a row has one guess. The
weights that judge are a moving average. There are fewer steps than theirs, so its decay is lower.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl.leak_meter.learn.fitting import AdamDescent, Inputs, embed
from vfl_party.base.seeds import derive_seed
from vfl_party.models import seed_torch

_STEPS, _BATCH, _LR, _DECAY = 1024, 16, 2e-3, 0.99
_ALPHA, _TEMPERATURE, _WEIGHT = 0.75, 0.8, 50.0


class Completed(nn.Module):
    """An encoder with a linear head on its standardised embeddings. Build inside ``seeded``."""

    def __init__(self, encoder: nn.Module, z_KD: Tensor, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(z_KD.shape[1], classes)
        self.mean_D, self.std_D = z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)

    def standardize(self, inputs: Inputs) -> Tensor:
        z: Tensor = (self.encoder(*inputs).flatten(1) - self.mean_D) / self.std_D
        return z


def semi_supervised(
    encoder: nn.Module,
    known: Inputs,
    classes_K: Tensor,
    others: Inputs,
    judged: Inputs,
    classes: int,
    seed: int,
) -> Tensor:
    """Trains a copy of an encoder with a head by MixMatch; returns the logits [N, classes] of
    ``judged`` rows.

    ``others``: rows without labels. Inputs are mixed; if some are codes of categories, embeddings
    are mixed instead.
    """
    encoder = copy.deepcopy(encoder).eval()
    with seed_torch(derive_seed(seed, "init", "mixmatch")), torch.no_grad():
        model = Completed(encoder, encoder(*known).flatten(1), classes).to(classes_K.device)
    judge = copy.deepcopy(model)
    random = np.random.default_rng(derive_seed(seed, "mixmatch"))
    descent = AdamDescent(model.parameters(), _LR)
    averages, new = tuple(judge.parameters()), tuple(model.parameters())
    size = min(_BATCH, len(classes_K), len(others[0]))
    hot_KC = functional.one_hot(classes_K, classes).float()
    for step in range(_STEPS):
        few = torch.from_numpy(random.choice(len(classes_K), size, replace=False))
        many = torch.from_numpy(random.choice(len(others[0]), size, replace=False))
        inputs = tuple(
            torch.cat([one[few], other[many]]) for one, other in zip(known, others, strict=True)
        )
        with torch.no_grad():
            guess_BC = sharpen(
                model.head(model.standardize(tuple(input_[size:] for input_ in inputs)))
            )
        targets = torch.cat([hot_KC[few], guess_BC])
        b = float(random.beta(_ALPHA, _ALPHA))
        share, order = max(b, 1 - b), torch.from_numpy(random.permutation(2 * size))
        if all(input_.is_floating_point() for input_ in inputs):
            z = model.standardize(tuple(mix(input_, share, order) for input_ in inputs))
        else:
            z = mix(model.standardize(inputs), share, order)
        descent.step(
            mixmatch_loss(model.head(z), mix(targets, share, order), size, _WEIGHT * step / _STEPS)
        )
        with torch.no_grad():
            torch._foreach_lerp_(averages, new, 1 - _DECAY)
    with torch.no_grad():
        logits: Tensor = judge.head((embed(judge.encoder, judged) - judge.mean_D) / judge.std_D)
    return logits.cpu()


def sharpen(logits_BC: Tensor) -> Tensor:
    """Returns the probabilities to the power of 1/T, scaled to a sum of 1."""
    return torch.softmax(torch.log_softmax(logits_BC, dim=1) / _TEMPERATURE, dim=1)


def mix(rows: Tensor, share: float, order: Tensor) -> Tensor:
    """Returns share · rows + (1 − share) · the same rows in another order."""
    return share * rows + (1 - share) * rows[order]


def mixmatch_loss(logits: Tensor, targets: Tensor, labelled: int, weight: float) -> Tensor:
    """Returns the cross-entropy of the first rows plus ``weight`` times the squared error of the
    others.
    """
    error = functional.mse_loss(torch.softmax(logits[labelled:], dim=1), targets[labelled:])
    return functional.cross_entropy(logits[:labelled], targets[:labelled]) + weight * error
