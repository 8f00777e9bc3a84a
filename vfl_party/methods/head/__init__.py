"""One upload of frozen representations, then a head on what the active party holds: SS-VFL-I (Castiglia et al. 2022).

Alg. 1, line 4: every party sends h_m(x_m) of its labelled rows once. Lines 6 to 10: the top model is trained on them
without another message. The encoders are used as the phase before left them, in eval mode, on rows as they are.
"""

from vfl_party.methods import Method
from vfl_party.methods.head.active import ActiveHead
from vfl_party.methods.head.passive import PassiveHead
from vfl_party.methods.head.settings import HeadSettings

METHOD = Method(HeadSettings, ActiveHead, PassiveHead)  # type: ignore[arg-type]
