"""Several processes of one party, a GPU each, as torchrun starts them: rank 0 is the party, the
others lend it GPUs.

Only rank 0 has the data, the exchange, the optimizer and the files. For each batch it sends the
others the weights and their share of the rows. They send their embeddings back and then receive
their share of the gradient; their gradients of the weights are summed at rank 0. The others keep
nothing beyond a batch, so there is nothing to lose or to resume.
"""

from vfl_party.ranks.follower import follow
from vfl_party.ranks.group import Ranks, started_by_torchrun
from vfl_party.ranks.leader import Guarded, SpreadEncoder, check_spread

__all__ = ["Guarded", "Ranks", "SpreadEncoder", "check_spread", "follow", "started_by_torchrun"]
