"""FedOnce (Wu et al. 2022), the local half: learns encoders without labels, so that one upload is
enough.

Alg. 1, lines 2 to 15: every passive party learns alone, nothing crosses a wire. The upload (line
16) and the active party's training (lines 18 to 30) are ``head`` with ``own_encoder = "trained"``;
``splitnn`` after it is multi-round FedOnce.
"""

from vfl_common.config.recipe import Recipe
from vfl_party.methods.fedonce.encoders import learnt_encoder
from vfl_party.methods.fedonce.phase import FedOnce
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.phases.method import Method, silent
from vfl_party.privacy.plan import PrivatePhase


def _private(
    name: str, settings: FedOnceSettings, recipe: Recipe, _rows: int
) -> PrivatePhase | None:
    if settings.dp is None:
        return None
    learn = [party.name for party in recipe.passives]
    if settings.active and recipe.active.features:
        learn.append(recipe.active.name)
    return PrivatePhase(name, settings.dp, tuple(learn), settings.batch_size, settings.epochs)


METHOD = Method(FedOnceSettings, FedOnce, FedOnce, learnt_encoder, private=_private, traffic=silent)
