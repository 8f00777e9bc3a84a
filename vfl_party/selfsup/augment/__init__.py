"""Makes random views of a batch, two for self-supervision and one for supervised phases: crops and
colours of images, corrupted features of tables.

All random numbers come from a CPU generator and are moved, so that views are equal on every device,
and a new generator with the same seed makes the same views. Every row has its own random numbers
(docs/explanation/decisions/0007).
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_party.data.inputs.features import Features
from vfl_party.data.inputs.made import BatchLog, BatchOrigin, DrawnView, Views
from vfl_party.selfsup.augment.images import ImageAugment
from vfl_party.selfsup.augment.settings import AugmentSettings
from vfl_party.selfsup.augment.tables import TableAugment

# The inputs of an encoder: (x,) or (x, categories).
Inputs: TypeAlias = tuple[Tensor, ...]

__all__ = ["Augment", "Inputs", "make_augment"]


class Augment(Protocol):
    """Makes views of one party's rows."""

    def two_views(self, inputs: Inputs, generator: torch.Generator) -> tuple[Inputs, Inputs]:
        """Returns two views of ``Features.inputs(rows)``, of the same shape; ``generator`` is on
        the CPU.
        """

    def one_view(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Returns one view, as ``two_views``; whole images (``crop_scale`` = [1, 1]) stay whole."""


class _Noting:
    """Makes views like ``augment``, and records how, for the party's other processes."""

    def __init__(self, augment: Augment, noted: BatchLog, views: Views) -> None:
        self._augment, self._noted, self._views = augment, noted, views

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
        made = self._noted.of(inputs)
        for which, view in enumerate(views):
            # One of two views may be the unchanged rows.
            if made is not None and view[0] is not inputs[0]:
                of = DrawnView(self._views, drawn, which, len(views))
                self._noted.note(view, BatchOrigin(made.rows, view=of))


def make_augment(
    settings: AugmentSettings, features: Features, pool_rows: Tensor | npt.NDArray[np.int64]
) -> Augment:
    """Chooses crops and colours if x is [N, C, H, W], corruption if it is [N, F] (flattened images
    too).

    ``pool_rows``: the party's own training rows, from which corruption takes its replacement
    values.
    """
    augment: Augment
    if len(features.spec.shape) == 3:
        augment = ImageAugment(settings)
    else:
        augment = TableAugment(settings, features, torch.as_tensor(pool_rows))
    if features.noted is None:
        return augment
    views = Views(settings.model_dump_json(), np.asarray(pool_rows))
    return _Noting(augment, features.noted, views)
