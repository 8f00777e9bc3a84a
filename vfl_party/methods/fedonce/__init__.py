"""FedOnce (Wu et al. 2022), the local half: encoders learnt without labels, so that one upload is enough.

Alg. 1, lines 2 to 15: every passive party alone, nothing crosses a wire. The upload (line 16) and the active party's
training (lines 18 to 30) are ``head`` with ``own_encoder = "trained"``; ``splitnn`` after it is multi-round FedOnce.
"""

from vfl_party.methods import Method
from vfl_party.methods.fedonce.encoders import learnt_encoder
from vfl_party.methods.fedonce.phase import FedOnce
from vfl_party.methods.fedonce.settings import FedOnceSettings

METHOD = Method(FedOnceSettings, FedOnce, FedOnce, learnt_encoder)  # type: ignore[arg-type]
