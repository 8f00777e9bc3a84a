"""``[policy.account]`` of the party file: the limits of what this party may release about the same
people over all runs.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vfl_common.config.base import Section

Limit = Annotated[int, Field(ge=0, le=2**62)]


class AccountLimits(Section):
    """The limits of what one peer may receive from one data set, over all runs. Tables that have
    people in common count as one data set, whatever their files are called. A run that would exceed
    a limit is refused before it starts. A message that would exceed a limit is not sent.
    """

    epsilon: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """The maximum ε of differential privacy for one person. It adds up training with ``dp``, the
    transform ``clipped_gaussian`` (both composed by Rényi divergences) and ``task.label_epsilon``.
    Default: no limit.
    """
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """The δ for which ε is computed. Keep it far below 1 / (number of people)."""
    numbers_of_a_person: Limit | None = None
    """The maximum number of values about one person that are sent. Default: no limit."""
    bytes_of_a_person: Limit | None = None
    """The maximum number of bytes about one person that are sent. Default: no limit."""
    bytes: Limit | None = None
    """The maximum number of bytes that are sent in all. Default: no limit."""
    split_bits: Limit | None = None
    """The maximum number of bits about one person that the splits of trees reveal: one bit for each
    split whose side the peer learns. Default: no limit.
    """
    alignments: Limit | None = None
    """The maximum number of alignments by psi. Default: no limit."""
    predictions: Limit | None = None
    """The maximum number of rows in joint predictions. Default: no limit."""
    predictions_of_a_person: Limit | None = None
    """The maximum number of joint predictions about one person. Default: no limit."""
    asked: Limit | None = None
    """The maximum number of ids that the active party may request from this party's served models,
    answered or not. Default: no limit.
    """

    together: bool = False
    """Whether all peers together must stay within the limits, as if one peer received everything.
    Set it if peers may collude. A message to several peers counts once for each peer.
    """

    @property
    def amounts(self) -> dict[str, float]:
        """{key: limit} for each limit that is set."""
        limits = self.model_dump(exclude={"delta", "together"}, exclude_none=True)
        return {name: limits[name] for name in limits}
