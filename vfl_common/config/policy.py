"""``[policy]`` of the party file: what may leave this party, in words that others may read."""

from __future__ import annotations

from typing import Literal

from vfl_common.config.account import AccountLimits
from vfl_common.config.base import Section


class PolicySettings(Section):
    """What may leave this party."""

    level: Literal["open", "careful", "strict"] = "careful"
    """The defaults of the other keys."""
    approval: Literal["none", "each"] = "none"
    """Whether each recipe needs a grant before it is run."""
    account: AccountLimits = AccountLimits()
    """What may be spent over all runs."""
