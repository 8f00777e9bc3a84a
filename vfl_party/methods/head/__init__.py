"""One upload of frozen representations, then training at the active party: SS-VFL-I and FedOnce.

SS-VFL-I (Castiglia et al. 2022, Alg. 1, lines 4 to 10) trains only the top model. FedOnce (Wu et
al. 2022, Alg. 1, lines 16 to 30) also trains the active party's own encoder. The passive encoders
are used as the phase before left them, in eval mode, on unchanged rows; each party sends one
bundle, for its training rows, and no gradient comes back.
"""

from __future__ import annotations

from vfl_common.config.recipe import Recipe
from vfl_party.methods.head.active import ActiveHead
from vfl_party.methods.head.passive import PassiveHead
from vfl_party.methods.head.settings import HeadSettings
from vfl_party.methods.head.upload import traffic
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import WHOLE_TASK, Method
from vfl_party.phases.sets import Learnt
from vfl_party.privacy.plan import PrivatePhase


class Head(Method[HeadSettings]):
    """One upload, and training at the active party."""

    def follows(self, settings: HeadSettings) -> frozenset[str]:
        _ = settings
        return WHOLE_TASK

    def own_sizes(self, settings: HeadSettings) -> bool:
        _ = settings
        return True

    def learns(self, settings: HeadSettings) -> Learnt:
        return settings.learns

    def no_partial(self, settings: HeadSettings) -> str:
        if settings.deadline_s is not None:
            return "deadline_s is for parties that hold all rows and are late"
        return "dp bounds what a row does that all parties hold" if settings.dp is not None else ""

    def noise(self, settings: HeadSettings) -> float:
        return settings.noise

    def traffic(self, party: Party, phase: str, settings: HeadSettings) -> Traffic:
        return traffic(party, phase, settings)

    def private(
        self, phase: str, settings: HeadSettings, recipe: Recipe, rows: int
    ) -> PrivatePhase | None:
        if settings.dp is None:
            return None
        # A row's label depends on no other row: nothing is matched.
        dp = settings.dp.model_copy(update={"mode": "fixed"})
        epochs = settings.epochs_over(rows)
        return PrivatePhase(phase, dp, (recipe.active.name,), settings.batch_size, epochs)


METHOD = Head(HeadSettings, ActiveHead, PassiveHead)
