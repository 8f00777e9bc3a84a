"""Several processes of one party, a GPU each, as torchrun starts them: rank 0 is the party, the others lend it GPUs.

Rank 0 alone has the data, the exchange, the optimizer and the files. For each batch it sends the others their share of
the rows and the weights; they send their embeddings back, then take their share of the gradient, and their gradients of
the weights are added up at rank 0. What the others hold is gone with a batch, so there is nothing to lose or to resume.
"""

from vfl_party.ranks.follower import follow
from vfl_party.ranks.group import Ranks, started_by_torchrun
from vfl_party.ranks.leader import Guarded, SpreadEncoder, check_spread

__all__ = ["Guarded", "Ranks", "SpreadEncoder", "check_spread", "follow", "started_by_torchrun"]
