"""Describes the position of a party in the ring of parties that align their rows, and creates its
exchanges with them.
"""

from __future__ import annotations

from functools import cached_property

import torch

from vfl_common import psi
from vfl_common.bundle import StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.psi import PHASE
from vfl_party.align import batches
from vfl_party.align.aligned import AlignmentContext
from vfl_party.align.exchanges import HELLO, LISTS, MASKED, SIZES, TAGS, TURNS
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Role
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy
from vfl_party.psi.curve import POINT_BYTES

CPU = torch.device("cpu")


class PsiRing:
    """The ring of all parties, from the view of one party. The active party is number 0.

    ``number``: The number of the pass; see ``vfl_party.data.passes``.
    """

    def __init__(
        self, recipe: Recipe, policy: Policy, context: AlignmentContext, number: int = 0
    ) -> None:
        self.names = [recipe.active.name, *(party.name for party in recipe.passives)]
        self.server, self.context = recipe.server, context
        self.me, self.size = self.names.index(context.name), len(self.names)
        self.number, self.passes = number, max(1, len(recipe.rows.keys))
        self.first_round = psi.first_round(number, self.size)
        # With rows.partial, the server marks the common rows with each of these parties separately.
        self.partial = recipe.rows.partial
        self.holders = self.names[1:] if self.partial and not self.me else []
        # The number of rows of each party; empty before ``Meeting.meet``.
        self.rows: list[int] = []
        role: Role = "passive" if self.me else "active"
        self._chains = {
            exchange.name: make_chains(recipe, PHASE, exchange, role, policy)
            for exchange in (HELLO, MASKED, TURNS, SIZES, TAGS, LISTS)
        }

    @property
    def active(self) -> str:
        """The name of the active party."""
        return self.names[0]

    @property
    def sender(self) -> str:
        """The name of the party before this one."""
        return self.names[(self.me - 1) % self.size]

    def make_step(self, round_: int, batch: int) -> StepKey:
        """Returns a step of this pass. Round 0 is the meeting; round ``size`` is the server's."""
        return StepKey(PHASE, self.first_round + round_, batch)

    def find_owner(self, round_: int) -> int:
        """Returns the number of the party whose rows this party masks in a round: this party in the
        first round, then the party before it in the ring, and so on.
        """
        return (self.me - round_ + 1) % self.size

    def count_bytes(self, owner: int, batch: int) -> int:
        """Returns the size in bytes of a batch of the owner's rows; 0 if the owner has fewer
        batches.
        """
        rows = min(batches.BATCH, self.rows[owner] - batch * batches.BATCH)
        return max(0, rows) * POINT_BYTES

    @cached_property
    def batches(self) -> int:
        """The number of batches of the party with the most rows."""
        return -(-max(self.rows) // batches.BATCH)

    def make_asking(self, exchange: Exchange, **sizes: int) -> Asking:
        """Returns this party's side of an exchange in which it sends the request."""
        peer = self.server if exchange.asks == "server" else self.active
        return Asking(
            exchange, PHASE, self._chains[exchange.name], self.context.connections, peer, CPU, sizes
        )

    def make_answering(self, exchange: Exchange, **sizes: int) -> Answering:
        """Returns this party's side of an exchange in which it sends the answer."""
        return Answering(
            exchange, PHASE, self._chains[exchange.name], self.context.connections, CPU, sizes
        )
