"""Makes random views of a batch: two for self-supervision and one for supervised phases. Images are
cropped and recoloured, and features of tables are corrupted.

All random numbers come from a CPU generator and are then moved to the device. So views are the same
on every device, and a new generator with the same seed makes the same views. Every row has its own
random numbers (docs/explanation/decisions/0007).
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
