"""SecureBoost (Cheng et al. 2021): gradient-boosted trees on the columns of all parties, with
encrypted gradients.

The active party encrypts the gradients g and h of each row. Passive parties sum them for each
possible split of their columns, and return the sums in a secret order. Splits and thresholds stay
at the party that owns the columns.
"""

from torch import nn

from vfl_party.methods.secureboost.active import ActiveSecureBoost
from vfl_party.methods.secureboost.common import traffic
from vfl_party.methods.secureboost.forest import NAME, Forest
from vfl_party.methods.secureboost.joint_walk import OnlineWalk, Walk
from vfl_party.methods.secureboost.passive import PassiveSecureBoost
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method


class SecureBoost(Method[SecureBoostSettings]):
    """SecureBoost: each party has its own part of one forest, and all parties compute predictions
    jointly.
    """

    def own_models(self) -> dict[str, nn.Module]:
        return {NAME: Forest()}

    def scores(self, party: Party, phase: str, settings: SecureBoostSettings) -> Walk:
        return Walk(party, phase, settings, "once")

    def online(self, party: Party, settings: SecureBoostSettings) -> OnlineWalk:
        return OnlineWalk(party, settings)

    def traffic(self, party: Party, phase: str, settings: SecureBoostSettings) -> Traffic:
        return traffic(party, phase, settings)


METHOD = SecureBoost(
    SecureBoostSettings, ActiveSecureBoost, PassiveSecureBoost, model="own", protocol=8
)
