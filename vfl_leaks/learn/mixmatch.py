"""MixMatch: a head and an encoder learn from a few labelled rows and many unlabelled rows.

The method is by Berthelot et al., NeurIPS 2019. Fu et al. use it for model completion (USENIX
Security 2022). A step takes B labelled and B unlabelled rows. The target of an unlabelled row is
the model's own prediction, sharpened: q_c = p_c^(1/T) / Σ p^(1/T). All 2B rows and targets are
mixed with the same rows in another order: x = l·x_i + (1 − l)·x_j, with l = max(b, 1 − b) and
b ~ Beta(α, α). The loss is the cross-entropy of the first B rows, plus λ·t times the mean squared
error of the probabilities of the last B rows, where t grows from 0 to 1. Rows are not augmented, so
each row has one prediction. The predictions of the attack use a moving average of the weights. Its
decay is lower than in the paper, because there are fewer steps.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_leaks.learn.fitting import AdamDescent, Inputs, embed
from vfl_party.base.seeds import derive_seed
from vfl_party.models import seed_torch

_STEPS, _BATCH, _LR, _DECAY = 1024, 16, 2e-3, 0.99
_ALPHA, _TEMPERATURE, _WEIGHT = 0.75, 0.8, 50.0


class MixMatchModel(nn.Module):
    """An encoder with a linear head on its standardised embeddings. The head's initial weights are
    random, so build it inside ``seed_torch``.
    """

    def __init__(self, encoder: nn.Module, z_KD: Tensor, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(z_KD.shape[1], classes)
        self.mean_D, self.std_D = z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)

    def standardize(self, inputs: Inputs) -> Tensor:
        z: Tensor = (self.encoder(*inputs).flatten(1) - self.mean_D) / self.std_D
        return z


def train_mixmatch(
    encoder: nn.Module,
    known: Inputs,
    classes_K: Tensor,
    unlabelled: Inputs,
    judged: Inputs,
    classes: int,
    seed: int,
) -> Tensor:
    """Trains a copy of an encoder with a head by MixMatch, and returns the logits of the judged
    rows, [N, classes].

    ``unlabelled``: rows without labels. MixMatch mixes the inputs of rows. If some inputs are codes
    of categories, it mixes the embeddings instead.
    """
    encoder = copy.deepcopy(encoder).eval()
    with seed_torch(derive_seed(seed, "init", "mixmatch")), torch.no_grad():
        model = MixMatchModel(encoder, encoder(*known).flatten(1), classes).to(classes_K.device)
    averaged = copy.deepcopy(model)
    random = np.random.default_rng(derive_seed(seed, "mixmatch"))
    descent = AdamDescent(model.parameters(), _LR)
    averaged_weights, weights = tuple(averaged.parameters()), tuple(model.parameters())
    size = min(_BATCH, len(classes_K), len(unlabelled[0]))
    hot_KC = functional.one_hot(classes_K, classes).float()
    for step in range(_STEPS):
        labelled_rows = torch.from_numpy(random.choice(len(classes_K), size, replace=False))
        unlabelled_rows = torch.from_numpy(random.choice(len(unlabelled[0]), size, replace=False))
        inputs = tuple(
            torch.cat([known_[labelled_rows], unlabelled_[unlabelled_rows]])
            for known_, unlabelled_ in zip(known, unlabelled, strict=True)
        )
        with torch.no_grad():
            guess_BC = sharpen(
                model.head(model.standardize(tuple(input_[size:] for input_ in inputs)))
            )
        targets = torch.cat([hot_KC[labelled_rows], guess_BC])
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
            torch._foreach_lerp_(averaged_weights, weights, 1 - _DECAY)
    with torch.no_grad():
        logits: Tensor = averaged.head(
            (embed(averaged.encoder, judged) - averaged.mean_D) / averaged.std_D
        )
    return logits.cpu()


def sharpen(logits_BC: Tensor) -> Tensor:
    """Returns the softmax probabilities to the power of 1/T, scaled to a sum of 1."""
    return torch.softmax(torch.log_softmax(logits_BC, dim=1) / _TEMPERATURE, dim=1)


def mix(rows: Tensor, share: float, order: Tensor) -> Tensor:
    """Returns share · rows + (1 − share) · rows[order]."""
    return share * rows + (1 - share) * rows[order]


def mixmatch_loss(logits: Tensor, targets: Tensor, labelled: int, weight: float) -> Tensor:
    """Returns the cross-entropy of the first ``labelled`` rows, plus ``weight`` times the squared
    error of the remaining rows' probabilities.
    """
    error = functional.mse_loss(torch.softmax(logits[labelled:], dim=1), targets[labelled:])
    return functional.cross_entropy(logits[:labelled], targets[:labelled]) + weight * error
