"""MoCo at a single party that has both halves: TAResSFL's pretraining, and MocoSFL's baseline."""

from __future__ import annotations

import torch

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.check import check_phase
from vfl_party.methods.mocosfl.memory import TrainedTail, zero
from vfl_party.methods.mocosfl.resist import Resistance
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import halves_of, momentum_of
from vfl_party.methods.mocosfl.training import TrainedHalf
from vfl_party.methods.mocosfl.views import AugmentedViews
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import ema_update

# Rows that are checked together.
_AT_ONCE = 1024
# The tolerance for scaled pixels.
_ROUNDING = 1e-4


class AloneMocoSFL(Phase):
    """One round is an epoch. Nothing is exchanged or averaged."""

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        _check_alone(party, name, settings)
        self.name, self.rounds = name, settings.epochs
        self._party, self._settings = party, settings
        self._views = AugmentedViews(party, name, settings)
        self._bottom = party.models["encoder"]
        self._half = TrainedHalf(self._bottom, settings.of_bottoms, settings.epochs)
        self._momentum = momentum_of(self._bottom)
        self._tail = TrainedTail(party, name, settings)
        self._resistance: Resistance | None = None
        if settings.resist is not None:
            self._resistance = Resistance(
                settings.resist,
                halves_of(party.recipe, settings).latent,
                settings.image,
                seed=derive_seed(party.own_seed, name),
                device=party.device,
                by_ssim=party.recipe.preset == "released",
            )

    def run_round(self, round_: int) -> RoundReport:
        party, per = self._party, self._views.batches
        if round_ == 0:
            self._tail.begin()
            self._momentum.load_state_dict(self._bottom.state_dict())
        total, similar = zero(party), 0.0
        for batch in range(per):
            v1, v2 = self._views.of(round_ * per + batch)
            with torch.no_grad():
                ema_update(self._momentum, self._bottom, self._settings.momentum)
                k = self._momentum(*v2)
            q = self._bottom(*v1)
            self._half.zero_grad()
            loss = self._tail.loss(q, k)
            if self._resistance is not None:
                dz, similarity = self._resistance.gradient(q, v1[0].clamp(0, 1))
                similar += similarity
                # Adds its gradient, and nothing to the value.
                if dz is not None:
                    paid = (q * dz).sum()
                    loss = loss + paid - paid.detach()
            loss.backward()  # type: ignore[no-untyped-call]
            self._half.step()
            self._tail.step()
            total += loss.detach()
            party.tick(self.name, round_, self.rounds, batch + 1, per)
        self._half.end_epoch()
        self._tail.end_epoch()
        metrics = {"loss": self._tail.mean(total, per)}
        return RoundReport(
            per,
            {"train": metrics if self._resistance is None else metrics | {"ssim": similar / per}},
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


def _check_alone(party: Party, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if a setting is for several parties, or if images are scaled so that
    ``resist`` cannot work.
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
    if settings.resist is not None and not _is_unit(party):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: resist compares reconstructions with pixels from 0 to 1, but the pixels of "
            f'{party.name} are outside this range. Set data.scale = "minmax".',
        )


def _is_unit(party: Party) -> bool:
    """Whether all pixels that the bottom gets are from 0 to 1."""
    rows = party.rows("local")
    # Other rows come from data.unaligned and are scaled in the same way.
    rows = rows[rows < len(party.data.ids)]
    for start in range(0, len(rows), _AT_ONCE):
        low, high = torch.aminmax(party.need_features().inputs(rows[start : start + _AT_ONCE])[0])
        if low.item() < -_ROUNDING or high.item() > 1.0 + _ROUNDING:
            return False
    return True
