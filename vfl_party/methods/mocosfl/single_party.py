"""Runs MoCo at a single party that has both halves of the network: TAResSFL's pretraining, and
MocoSFL's baseline.
"""

from __future__ import annotations

import torch

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.check import check_phase
from vfl_party.methods.mocosfl.memory import TrainedTail, make_zero
from vfl_party.methods.mocosfl.resist import Resistance
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import build_halves, make_moving_average
from vfl_party.methods.mocosfl.training import TrainedHalf
from vfl_party.methods.mocosfl.views import AugmentedViews
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import ema_update

# The number of rows that are checked together.
_CHECKED_ROWS = 1024
# The tolerance for scaled pixels outside the range from 0 to 1.
_ROUNDING = 1e-4


class SinglePartyMocoSFL(Phase):
    """Trains both halves at a single party. One round is an epoch. Nothing is exchanged or
    averaged.
    """

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        _check_single_party(party, name, settings)
        self.name, self.rounds = name, settings.epochs
        self._party, self._settings = party, settings
        self._views = AugmentedViews(party, name, settings)
        self._bottom = party.models["encoder"]
        self._half = TrainedHalf(self._bottom, settings.of_bottoms, settings.epochs)
        self._momentum = make_moving_average(self._bottom)
        self._tail = TrainedTail(party, name, settings)
        self._resistance: Resistance | None = None
        if settings.resist is not None:
            self._resistance = Resistance(
                settings.resist,
                build_halves(party.recipe, settings).latent,
                settings.image,
                seed=derive_seed(party.own_seed, name),
                device=party.device,
                by_ssim=party.recipe.preset == "released",
            )

    def run_round(self, round_: int) -> RoundReport:
        party, batches_per_epoch = self._party, self._views.batches
        if round_ == 0:
            self._tail.start_from_tail()
            self._momentum.load_state_dict(self._bottom.state_dict())
        total, total_ssim = make_zero(party), 0.0
        for batch in range(batches_per_epoch):
            v1, v2 = self._views.make_views(round_ * batches_per_epoch + batch)
            with torch.no_grad():
                ema_update(self._momentum, self._bottom, self._settings.momentum)
                k = self._momentum(*v2)
            q = self._bottom(*v1)
            self._half.zero_grad()
            loss = self._tail.loss(q, k)
            if self._resistance is not None:
                dz, similarity = self._resistance.gradient(q, v1[0].clamp(0, 1))
                total_ssim += similarity
                # This adds the penalty's gradient to the loss, but nothing to its value.
                if dz is not None:
                    term = (q * dz).sum()
                    loss = loss + term - term.detach()
            loss.backward()  # type: ignore[no-untyped-call]
            self._half.step()
            self._tail.step()
            total += loss.detach()
            party.tick(self.name, round_, self.rounds, batch + 1, batches_per_epoch)
        self._half.end_epoch()
        self._tail.end_epoch()
        metrics = {"loss": self._tail.compute_mean(total, batches_per_epoch)}
        return RoundReport(
            batches_per_epoch,
            {
                "train": metrics
                if self._resistance is None
                else metrics | {"ssim": total_ssim / batches_per_epoch}
            },
        )

    def state(self) -> Tree:
        return {
            "half": self._half.state(),
            "momentum": dict(self._momentum.state_dict()),
            "tail": self._tail.state(),
            "resistance": None if self._resistance is None else self._resistance.state(),
        }

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
        self._tail.load_state(tree["tail"])
        if self._resistance is not None:
            self._resistance.load_state(tree["resistance"])


def _check_single_party(party: Party, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if a setting needs several parties, or if ``resist`` cannot work because of
    the range of pixels.
    """
    check_phase(party.recipe, phase, settings)
    where = f"recipe: phases: {phase}"
    if settings.frozen:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: frozen = true leaves the bottom model unchanged, but {party.name} is "
            "alone, so it was never trained. Remove frozen.",
        )
    for key in ("averages_per_epoch", "sample", "auto_adjust", "shared_memory"):
        if key in settings.model_fields_set:
            raise InputError(
                Code.CONFIG_INVALID,
                (f"{where}: {key} needs several parties, but {party.name} is alone. Remove {key}."),
            )
    if settings.resist is not None and not _has_unit_pixels(party):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: resist compares reconstructions with pixels from 0 to 1, but the pixels of "
            f'{party.name} are outside this range. Set data.scale = "minmax".',
        )


def _has_unit_pixels(party: Party) -> bool:
    """Whether all pixels that the bottom model gets are from 0 to 1."""
    rows = party.rows("local")
    # Other rows come from data.unaligned and are scaled in the same way.
    rows = rows[rows < len(party.data.ids)]
    for start in range(0, len(rows), _CHECKED_ROWS):
        low, high = torch.aminmax(
            party.need_features().inputs(rows[start : start + _CHECKED_ROWS])[0]
        )
        if low.item() < -_ROUNDING or high.item() > 1.0 + _ROUNDING:
            return False
    return True
