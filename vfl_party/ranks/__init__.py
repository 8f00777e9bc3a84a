"""Several processes of one party, a GPU each, on one machine or several, as torchrun starts them:
rank 0 is the party, the others lend it GPUs.

Only rank 0 has the exchange, the optimizer and the files. All read the party's table. For each
batch rank 0 sends the others the weights and the positions of the rows. They send their embeddings
back and then receive their share of the gradient; their gradients of the weights are summed at rank
0. The others have no state of the run, so there is nothing to lose or to resume.
"""

from vfl_party.ranks.follower import follow
from vfl_party.ranks.group import Ranks, join_ranks
from vfl_party.ranks.leader import RankGuardedPhase, SpreadEncoder, check_spread
from vfl_party.ranks.rows import RankRows, TablePart, begin_ranks

__all__ = [
    "RankGuardedPhase",
    "RankRows",
    "Ranks",
    "SpreadEncoder",
    "TablePart",
    "begin_ranks",
    "check_spread",
    "follow",
    "join_ranks",
]
