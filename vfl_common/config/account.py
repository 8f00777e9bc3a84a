"""``[policy.account]`` of the party file: what may be spent on the same people over all runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vfl_common.config.base import Section

Limit = Annotated[int, Field(ge=0, le=2**62)]


class AccountLimits(Section):
    """What may be spent on one data set at one peer, over all runs. Tables that have people in
    common are one data set, whatever their files are called. A run that would spend more is refused
    before it starts; and what would go beyond a limit does not leave.
    """

    epsilon: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """The most ε of differential privacy for a person: of training with ``dp`` and of the transform
    ``clipped_gaussian``, composed by Rényi divergences, and of ``task.label_epsilon``. Default: no
    limit.
    """
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """The δ at which ε is counted; keep it far below 1 / people."""
    numbers_of_a_person: Limit | None = None
    """The most numbers about one person. Default: no limit."""
    bytes_of_a_person: Limit | None = None
    """The most bytes about one person. Default: no limit."""
    bytes: Limit | None = None
    """The most bytes in all. Default: no limit."""
    split_bits: Limit | None = None
    """The most bits about one person that the sides of trees' splits tell. Default: no limit."""
    alignments: Limit | None = None
    """How often rows may be aligned by psi. Default: no limit."""
    predictions: Limit | None = None
    """The most rows that are predicted jointly. Default: no limit."""
    predictions_of_a_person: Limit | None = None
    """How often one person may be predicted jointly. Default: no limit."""
    asked: Limit | None = None
    """For how many ids the active party may ask this party's served models, whether they are
    answered or not. Default: no limit.
    """

    together: bool = False
    """Hold all peers to the limits together, as if one peer had what all of them got: peers may
    collude. A message to several peers counts once for each.
    """

    @property
    def amounts(self) -> dict[str, float]:
        """{key: the limit}, of those that there are."""
        limits = self.model_dump(exclude={"delta", "together"}, exclude_none=True)
        return {name: limits[name] for name in limits}
