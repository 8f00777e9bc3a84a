"""Filter: one step of the chain that all tensors pass before they leave a party; and the noise that
filters add, which no peer can reproduce.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from vfl_common.bundle import BundleSpec, StepKey
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.plugins import PlugIns

Tensors = Mapping[str, Tensor]


class Passage(NamedTuple):
    """The step, sender and receiver of one bundle."""

    step: StepKey
    sender: str
    receiver: str


# The passage of tensors that are not part of a bundle, such as tensors in a test.
NOWHERE = Passage(StepKey("", 0, 0), "", "")


class OutboundBundle(NamedTuple):
    """A bundle that is about to leave.

    ``kind``: the ledger's name of the kind. ``to``: the receivers, each of which gets the whole
    bundle. ``numbers``: the number of values before the codec. ``rows``: the numbers of the rows
    that the bundle describes, or the record's word for all or no rows; None: no individual rows.
    ``people``: the number of rows that the bundle describes individually.
    """

    step: StepKey
    kind: str
    to: Sequence[str]
    numbers: int
    payload_bytes: int
    rows: Sequence[int] | npt.NDArray[Any] | str | None
    people: int


class Filter:
    """Changes tensors before they leave, and undoes at the receiver what can be undone.

    A transform (noise), a policy and a codec are filters. This base class changes nothing. A filter
    that needs the step overrides ``apply_at`` instead of ``apply``. A filter whose receiver needs
    the original spec overrides ``undo_at`` instead of ``undo``.

    ``text``: the filter's name in `vfl forecast` and the summary. ``on_host``: whether arriving
    tensors pass ``undo_at`` before they are copied to a GPU, if no other filter is undone first.
    ``repeats``: whether the same tensors at the same step give the same result for every receiver.
    ``draws``: whether the filter adds noise. ``of_plugin``: whether the filter is a transform of a
    plug-in; set when the filter is made. ``costs``: the privacy cost for a row of each tensor that
    describes it, if the filter is differentially private regardless of the other filters; None: it
    is not.
    """

    text = "nothing"
    on_host = False
    repeats = False
    draws = False
    of_plugin = False
    costs: Mechanism | None = None
    # Names of tensors that ``tell`` must pass to the filter before each ``apply``.
    knows: frozenset[str] = frozenset()

    def tell(self, beside: Tensors) -> None:
        """Receives tensors about the next rows, such as their labels. The sender has them and does
        not send them.
        """
        _ = beside

    def apply(self, tensors: Tensors) -> Tensors:
        """Returns the tensors to send. The sender calls this. Raises VflError if the tensors may
        not leave.
        """
        return tensors

    def leaves(self, leaving: OutboundBundle) -> None:
        """Checks a bundle that has passed ``apply``. The sender calls this before the bundle is
        recorded and sent. Raises VflError if the bundle may not leave.
        """
        _ = leaving

    def renew(self) -> None:
        """Replaces the random generator, so that the next noise is new. Called if a receiver would
        get the same noise twice.
        """

    def undo(self, tensors: Tensors) -> Tensors:
        """Returns the inverse of ``apply``, as far as one exists. The receiver calls this."""
        return tensors

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        """Applies the filter to the bundle ``at``. The chain calls this method, which calls
        ``apply`` by default.
        """
        _ = at
        return self.apply(tensors)

    def undo_at(self, at: Passage, tensors: Tensors, spec: BundleSpec) -> Tensors:
        """Undoes the filter for the bundle ``at``; calls ``undo`` by default. ``spec``: the spec of
        the tensors before ``apply``.
        """
        _ = at, spec
        return self.undo(tensors)

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec, after ``apply``, of tensors that have ``spec`` before it."""
        return spec

    def state(self) -> dict[str, Any] | None:
        """Returns the state on which later calls of ``apply`` depend, for the party's checkpoints;
        None without a state.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        _ = state


# The noise of a transform must be positive, because a recipe that lists the transform asks for
# noise.
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
# A noise amplifier among a method's settings may be 0, which means no noise.
Amplifier = Annotated[float, Field(ge=0.0, le=1e6)]


class PrivateGaussian:
    """Draws N(0, 1) or Laplace(1) from a generator whose key comes from the operating system, never
    from the recipe's seed.

    A peer that knows the seed could draw the same noise and subtract it. The key of numpy's Philox
    has 128 bits. Torch's CPU generator uses only 32 bits of a seed, few enough to try them all.
    """

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def like(self, reference: Tensor) -> Tensor:
        """Draws float32 noise of the reference's shape, on its device."""
        return torch.from_numpy(self._random.standard_normal(reference.shape, dtype=np.float32)).to(
            reference.device
        )

    def laplace_like(self, reference: Tensor) -> Tensor:
        """Draws float32 noise of Laplace(1) of the reference's shape, on its device."""
        drawn = self._random.laplace(size=tuple(reference.shape)).astype(np.float32)
        return torch.from_numpy(drawn).to(reference.device)

    def state(self) -> dict[str, Any]:
        """Returns the generator's state, only for this party's checkpoints. Anyone who knows the
        state can subtract the noise.
        """
        state = dict(self._random.bit_generator.state)
        counters = {name: array.tolist() for name, array in state["state"].items()}
        return {**state, "state": counters, "buffer": state["buffer"].tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the random sequence of the generator that returned ``state``."""
        self._random.bit_generator.state = state


class NoisyFilter(Filter):
    """Base class of filters that add noise, which they draw from ``random``."""

    draws = True

    def __init__(self) -> None:
        self._random = PrivateGaussian()

    @property
    def random(self) -> PrivateGaussian:
        """The generator, whose key comes from the operating system."""
        return self._random

    def renew(self) -> None:
        self._random = PrivateGaussian()

    def state(self) -> dict[str, Any]:
        """Returns the generator's state, only for this party's checkpoints."""
        return self._random.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the random sequence of the filter that returned ``state``."""
        self._random.load_state(state)


@dataclass(frozen=True)
class BuiltIns(PlugIns):
    """The plug-ins of one group: ``exports`` of our own, by name, and those of other projects.
    ``ours``: the names in ``exports``.
    """

    exports: Mapping[str, Any] = field(compare=False)

    def load(self, name: str, where: str) -> Any:
        """Returns our own export of that name, or else as ``PlugIns.load``."""
        if name in self.exports and name not in self._get_plugins():
            return self.exports[name]
        return super().load(name, where)
