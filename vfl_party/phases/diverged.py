"""Ends training that diverges, at the party whose numbers are no longer finite, before the party
sends these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from vfl_common.bundle import HUGE, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.outbound.exchange import nonfinite
from vfl_party.phases.context import Party


def check_own(party: Party, step: StepKey, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError (NON_FINITE) if tensors that a party has computed for a step contain NaN or
    infinity.
    """
    for name, tensor in tensors.items():
        if nonfinite(tensor):
            raise InputError(
                Code.NON_FINITE,
                f"the numbers {name} of {party.name} at {step} hold NaN or infinity: its training "
                "diverged. Lower the learning rate.",
            )


def check_sums(
    party: Party,
    step: StepKey,
    loss: Tensor,
    gradients: Iterable[Tensor],
    received: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Checks the loss and the gradients that the active party has computed from received tensors,
    before it answers.

    Args:
        loss: The loss, a scalar.
        gradients: The gradients that the active party will send.
        received: {party: {name: the tensor that it has sent}}.

    Raises PeerError (NON_FINITE) if the loss or a gradient is not finite and a party has sent
    numbers too large to compute with. Raises InputError if no party has sent such numbers.
    """
    if not any(nonfinite(tensor.detach()) for tensor in (loss, *gradients)):
        return
    for name, tensors in received.items():
        for key, tensor in tensors.items():
            if tensor.detach().abs().max().item() > HUGE:
                raise PeerError(
                    Code.NON_FINITE,
                    f"tensor {key!r} of {name} at {step} holds numbers beyond {HUGE:g}, too large "
                    "to compute with; its training diverged. Take a lower learning rate.",
                    party=name,
                )
    raise InputError(
        Code.NON_FINITE,
        f"the loss of {party.name} at {step}, or its gradient, is NaN or infinite: its training "
        "diverged. Take a lower learning rate.",
    )
