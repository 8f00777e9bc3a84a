"""Runs several processes of one party, each with a GPU, on one or several machines, started by
torchrun. Rank 0 is the party, and the other ranks compute on their GPUs for it.

Only rank 0 has the connections, the optimizer and the files. All ranks read the party's table. For
each batch, rank 0 sends the weights and the positions of the rows to the other ranks. These send
their embeddings back and then receive their share of the gradient. The gradients of the weights are
summed at rank 0. The other ranks have no state of the run, so they have nothing to save or resume.
"""

from vfl_party.ranks.follower import RankRows, TablePart, begin_ranks, follow
from vfl_party.ranks.group import Ranks, join_ranks
from vfl_party.ranks.leader import RankGuardedPhase, SpreadEncoder, check_spread

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
