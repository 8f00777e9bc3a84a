"""What attacks train: heads and decoders on few rows, and an encoder of the attacker's own without labels."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_party.models import seeded
from vfl_party.seeds import batches, derive_seed

Inputs = tuple[Tensor, ...]
_HEAD_STEPS, _TUNED_STEPS, _LR, _DECAY = 300, 150, 2e-3, 1e-3
_DECODER_STEPS, _DECODER_WIDTH = 400, 128
_SSL_EPOCHS, _SSL_BATCH, _SSL_ROWS, _CORRUPTED = 10, 256, 10_000, 0.3


@torch.no_grad()
def embed(encoder: nn.Module, inputs: Inputs) -> Tensor:
    """Returns an encoder's embeddings [N, D] of many rows, in evaluation mode."""
    encoder.eval()
    return torch.cat(
        [encoder(*part) for part in zip(*(torch.split(each, 1024) for each in inputs), strict=True)]
    ).flatten(1)


def classify(
    encoder: nn.Module, known: Inputs, classes_K: Tensor, judged: Inputs, classes: int, seed: int, *, tuned: bool
) -> Tensor:
    """Trains a linear head on an encoder with the classes of K rows; returns the logits [N, classes] of others.

    ``tuned``: the encoder is trained, too (a copy of it), otherwise it stays as it is.
    """
    encoder = copy.deepcopy(encoder).eval()
    with torch.no_grad():
        z_KD = encoder(*known).flatten(1)
    mean_D, std_D = z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)
    with seeded(derive_seed(seed, "init", "head")):
        head = nn.Linear(z_KD.shape[1], classes)
    head.to(z_KD.device)
    weights = [*head.parameters(), *(encoder.parameters() if tuned else ())]
    optimizer = torch.optim.Adam(weights, lr=_LR, weight_decay=_DECAY)
    for _ in range(_TUNED_STEPS if tuned else _HEAD_STEPS):
        z = encoder(*known).flatten(1) if tuned else z_KD
        loss = functional.cross_entropy(head((z - mean_D) / std_D), classes_K)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        logits: Tensor = head((embed(encoder, judged) - mean_D) / std_D)
    return logits.cpu()


def self_supervised(encoder: nn.Module, inputs: Inputs, seed: int) -> nn.Module:
    """Trains an encoder on rows without labels: SimSiam; in each of two views some numbers are another row's."""
    rows = np.arange(min(len(inputs[0]), _SSL_ROWS), dtype=np.int64)
    some = tuple(each[: len(rows)] for each in inputs)
    with seeded(derive_seed(seed, "init", "predictor")), torch.no_grad():
        width = encoder(*(each[:2] for each in some)).flatten(1).shape[1]
        predictor = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    predictor.to(some[0].device)
    drawn = torch.Generator().manual_seed(derive_seed(seed, "views") % 2**63)
    optimizer = torch.optim.Adam([*encoder.parameters(), *predictor.parameters()], lr=1e-3)
    encoder.train()
    for epoch in range(_SSL_EPOCHS):
        for rows_B in batches(seed, "own ssl", epoch, rows, _SSL_BATCH):
            if len(rows_B) < 2:
                continue
            one, other = (encoder(*view(some, rows_B, drawn)).flatten(1) for _ in range(2))
            loss = -(
                functional.cosine_similarity(predictor(one), other.detach()).mean()
                + functional.cosine_similarity(predictor(other), one.detach()).mean()
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return encoder.eval()


def view(inputs: Inputs, rows_B: np.ndarray, drawn: torch.Generator) -> Inputs:
    """Returns rows in which some numbers are another row's."""
    found = []
    for each in inputs:
        own = each[torch.from_numpy(rows_B)]
        other = each[torch.randint(len(each), (len(own),), generator=drawn)]
        hidden = torch.rand(own.shape, generator=drawn) < _CORRUPTED
        found.append(torch.where(hidden.to(own.device), other, own))
    return tuple(found)


def decode(known_KD: Tensor, values_KF: Tensor, judged_ND: Tensor, seed: int) -> Tensor:
    """Trains an MLP from K rows' inputs to their values, and returns the values [N, F] that it finds for others.

    A fifth of the known rows decides when training stops, and whether the known rows' mean is better than all.
    """
    mean_D, std_D = known_KD.mean(dim=0), known_KD.std(dim=0).clamp_min(1e-6)
    mean_F, std_F = values_KF.mean(dim=0), values_KF.std(dim=0).clamp_min(1e-6)
    x, y = (known_KD - mean_D) / std_D, (values_KF - mean_F) / std_F
    with seeded(derive_seed(seed, "init", "decoder")):
        decoder = nn.Sequential(nn.Linear(x.shape[1], _DECODER_WIDTH), nn.ReLU(), nn.Linear(_DECODER_WIDTH, y.shape[1]))
    held = max(1, len(x) // 5)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3, weight_decay=1e-4)
    best, kept = y[:held].pow(2).mean().item(), None
    for step in range(_DECODER_STEPS):
        loss = functional.mse_loss(decoder(x[held:]), y[held:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                error = functional.mse_loss(decoder(x[:held]), y[:held]).item()
            if error < best:
                best, kept = error, copy.deepcopy(decoder.state_dict())
    if kept is None:
        return mean_F.expand(len(judged_ND), -1)
    decoder.load_state_dict(kept)
    with torch.no_grad():
        found: Tensor = decoder((judged_ND - mean_D) / std_D) * std_F + mean_F
    return found


def decode_table(
    known_KD: Tensor, values_KF: Tensor, judged_ND: Tensor, seed: int, groups: Iterable[range] = ()
) -> Tensor:
    """Returns what ``decode`` finds for the columns of numbers, and by itself for each of ``groups``, [N, F].

    One decoder for all would give up on all if there are many columns that cannot be read, as those of a category with
    many values.
    """
    parts = [[*group] for group in groups]
    inside = {place for part in parts for place in part}
    numbers = [place for place in range(values_KF.shape[1]) if place not in inside]
    found = torch.empty(len(judged_ND), values_KF.shape[1])
    for part in (numbers, *parts):
        if part:
            found[:, part] = decode(known_KD, values_KF[:, part], judged_ND, seed)
    return found


def is_mean(found_NF: Tensor) -> bool:
    """Whether ``decode`` has found nothing better than the mean: then it gives all rows the same."""
    return bool((found_NF == found_NF[:1]).all())


def explained(found_NF: Tensor, truth_NF: Tensor) -> list[float]:
    """Returns R² of each column: 1 − (squared error) / (that of the column's mean); 0 for a constant column."""
    error = (found_NF.double() - truth_NF.double()).pow(2).mean(dim=0)
    spread = truth_NF.double().var(dim=0, correction=0)
    r2: Sequence[float] = torch.where(spread > 0, 1 - error / spread.clamp_min(1e-300), 0.0).tolist()
    return [*r2]
