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
from vfl_party.phases.method import Method
from vfl_party.privacy.plan import PrivatePhase


def _noise(settings: HeadSettings) -> float:
    return settings.noise


def _private(name: str, settings: HeadSettings, recipe: Recipe, rows: int) -> PrivatePhase | None:
    if settings.dp is None:
        return None
    # A row's label depends on no other row: nothing is matched.
    dp = settings.dp.model_copy(update={"mode": "fixed"})
    return PrivatePhase(
        name, dp, (recipe.active.name,), settings.batch_size, settings.epochs_over(rows)
    )


METHOD = Method(
    HeadSettings, ActiveHead, PassiveHead, noise=_noise, private=_private, traffic=traffic
)
