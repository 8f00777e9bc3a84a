"""Chain: the filters of one direction of an exchange, applied at the sender and undone at the
receiver.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vfl_common.bundle import BundleSpec, Kind
from vfl_common.errors import Code, InputError, VflError
from vfl_common.summary import ARROW
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.plugins import where_it_failed
from vfl_party.outbound.declared import spec_of
from vfl_party.outbound.filter import NOWHERE, Filter, OutboundBundle, Passage, Tensors
from vfl_party.outbound.sent import SentDigests

log = logging.getLogger(__name__)


class Chain:
    """The filters of one direction of an exchange, in the order of application: fixed when the
    chain is made.

    ``codec``: the last one, if any. ``sent``: what has left through the chain of this ``way``
    before; None: it is not tracked.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        codec: Filter | None = None,
        sent: SentDigests | None = None,
        way: str = "",
    ) -> None:
        self.filters = (*filters, *([codec] if codec is not None else []))
        self._coded = codec is not None
        # The names of all tensors that the filters must be told.
        self.knows = frozenset(name for filter_ in self.filters for name in filter_.knows)
        # Filters that change nothing are not called, to save time at every step.
        self._apply = [filter_ for filter_ in self.filters if _overrides(filter_, "apply")]
        self._undo = [
            place
            for place, filter_ in reversed([*enumerate(self.filters)])
            if _overrides(filter_, "undo")
        ]
        self._leaves = [
            filter_ for filter_ in self.filters if type(filter_).leaves is not Filter.leaves
        ]
        self._noisy = (
            [filter_ for filter_ in self.filters if filter_.draws] if sent is not None else []
        )
        self._sent, self._way = sent, way
        # {id of a spec: that spec and its stages}; holding the spec keeps its id from being reused.
        self._specs: dict[int, tuple[BundleSpec, ...]] = {}
        # Dtypes and shapes for which apply has kept to wire_spec.
        self._agreeing: set[tuple[Any, ...]] = set()

    def apply(self, tensors: Tensors, at: Passage = NOWHERE) -> Tensors:
        """Returns what goes to the wire. Raises VflError if it may not leave."""
        if not self._apply:
            return tensors
        tensors = changed = {name: x.detach() for name, x in tensors.items()}
        if self._noisy and at is not NOWHERE:
            self._renew_noise(at, tensors)
        for filter_ in self._apply:
            before = _generators(tensors) if filter_.of_plugin else ()
            with _name_filter(filter_, "cannot be applied to what leaves"):
                changed = dict(filter_.apply_at(at, changed))
            if filter_.of_plugin and before != _generators(tensors):
                raise _draw_error(filter_)
        signature = tuple((name, x.dtype, x.shape) for name, x in tensors.items())
        if signature not in self._agreeing:
            self._check(_as_sent(tensors), changed)
            self._agreeing.add(signature)
        return changed

    @property
    def watches(self) -> bool:
        """Whether ``leaves`` does anything."""
        return bool(self._leaves)

    def leaves(self, leaving: OutboundBundle) -> None:
        """Has each filter check a bundle that is about to leave. Raises VflError if it may not."""
        for filter_ in self._leaves:
            with _name_filter(filter_, "cannot check what leaves"):
                filter_.leaves(leaving)

    def _renew_noise(self, at: Passage, tensors: Tensors) -> None:
        """Draws new noise if the receiver has other tensors of this step under the noise that comes
        next.
        """
        if self._sent is not None and self._sent.differs(self._way, at, tensors):
            log.warning(
                "%s received other tensors of %s, %s, before the interruption: new noise is drawn "
                "for them",
                at.receiver,
                self._way,
                at.step,
                extra={"event": "noise"},
            )
            for filter_ in self._noisy:
                filter_.renew()

    def _check(self, spec: BundleSpec, tensors: Tensors) -> None:
        """Raises InputError if ``tensors``, made from ``spec``, are not what the chain declares."""
        declared, sent = self._declare(spec)[-1].tensors, _as_sent(tensors).tensors
        for name in sorted(declared.keys() | sent.keys()):
            want, got = declared.get(name), sent.get(name)
            if want != got:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self}: tensor {name!r} leaves as {got or 'nothing'}, but wire_spec declares "
                    f"{want or 'nothing'}. Keep the tensor's shape and dtype, or declare the new "
                    "ones in wire_spec of the plug-in's Filter.",
                )

    def undo(
        self, tensors: dict[str, Tensor], at: Passage = NOWHERE, spec: BundleSpec | None = None
    ) -> dict[str, Tensor]:
        """Returns what the receiver works with; ``spec``: of what was given to ``apply``. Raises
        VflError.

        Raises PeerError if the tensors cannot come from ``apply``.
        """
        if not self._undo:
            return tensors
        return self._undone(self._undo, tensors, at, spec)

    @property
    def undoes_on_host(self) -> bool:
        """Whether what arrives is undone before it is copied to a GPU, at first."""
        return bool(self._undo) and self.filters[self._undo[0]].on_host

    def undo_first(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        """Undoes the filter that was applied last. Raises as ``undo``."""
        return self._undone(self._undo[:1], tensors, at, spec)

    def undo_rest(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        """Undoes the others. Raises as ``undo``."""
        return self._undone(self._undo[1:], tensors, at, spec)

    @property
    def repeats(self) -> bool:
        """Whether the same tensors at the same step become the same for every receiver."""
        return all(filter_.repeats for filter_ in self._apply)

    def _undone(
        self,
        places: Sequence[int],
        tensors: dict[str, Tensor],
        at: Passage,
        spec: BundleSpec | None,
    ) -> dict[str, Tensor]:
        stages = self._stages(spec) if spec is not None else ()
        result: Tensors = tensors
        for place in places:
            filter_ = self.filters[place]
            with _name_filter(filter_, "cannot be undone on what arrived"):
                result = dict(
                    filter_.undo_at(at, result, stages[place]) if stages else filter_.undo(result)
                )
        return dict(result)

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec of tensors of ``spec`` as they cross the wire."""
        return self._stages(spec)[-1]

    def before_codec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec of tensors of ``spec`` when all filters but the codec have been
        applied.
        """
        return self._stages(spec)[-2 if self._coded else -1]

    def _stages(self, spec: BundleSpec) -> tuple[BundleSpec, ...]:
        """Returns ``spec``, and what each filter makes of it."""
        known = self._specs.get(id(spec))
        if known is None:
            known = self._specs[id(spec)] = self._declare(spec)
        return known

    def _declare(self, spec: BundleSpec) -> tuple[BundleSpec, ...]:
        stages = [spec]
        for filter_ in self.filters:
            with _name_filter(filter_, "cannot give the spec of what leaves"):
                made = filter_.wire_spec(stages[-1])
                if not isinstance(made, BundleSpec):
                    raise TypeError(f"wire_spec returns a {type(made).__name__}, not a BundleSpec")
                stages.append(made)
        return tuple(stages)

    @property
    def costs(self) -> Mechanism | None:
        """The privacy cost of each tensor for a row in it; None if no filter makes it private."""
        return next((filter_.costs for filter_ in self.filters if filter_.costs is not None), None)

    def tell(self, beside: Tensors) -> None:
        """Tells each filter what it may know of the rows that leave next; see ``Filter.tell``."""
        for filter_ in self.filters:
            filter_.tell(beside)

    def state(self) -> list[dict[str, Any] | None]:
        """Returns each filter's state."""
        return [filter_.state() for filter_ in self.filters]

    def load_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restores what ``state`` returned."""
        for filter_, state in zip(self.filters, states, strict=True):
            if state is not None:
                filter_.load_state(state)

    def __str__(self) -> str:
        return ARROW.join(filter_.text for filter_ in self.filters) or "unchanged"


def _overrides(filter_: Filter, what: str) -> bool:
    """Whether a filter does something in ``apply``, or ``undo``."""
    return any(
        getattr(type(filter_), name) is not getattr(Filter, name) for name in (what, f"{what}_at")
    )


def _generators(tensors: Tensors) -> tuple[object, ...]:
    """Returns the states of torch's generators from which noise on ``tensors`` might be drawn."""
    devices = dict.fromkeys(x.device for x in tensors.values() if x.is_cuda)
    states = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
    return tuple(state.numpy().tobytes() for state in states)


def _draw_error(filter_: Filter) -> InputError:
    """Returns the error of a transform that draws from torch's generators, whose seed follows from
    the recipe's.
    """
    return InputError(
        Code.CONFIG_INVALID,
        f"{filter_.text}: the transform draws from torch's generator, which every peer can repeat "
        "from the recipe's seed. Derive it from vfl_party.outbound.noise.NoisyFilter, and draw "
        "from self._random.",
    )


@contextlib.contextmanager
def _name_filter(filter_: Filter, what: str) -> Iterator[None]:
    """Converts an error of a filter, which may be a plug-in, to an InputError with its name."""
    try:
        yield
    except VflError:
        raise
    except Exception as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{filter_.text} {what}: it failed {where_it_failed(error)}. Correct the plug-in, or "
            "remove it.",
        ) from error


def _as_sent(tensors: Tensors) -> BundleSpec:
    """Returns dtypes and shapes of tensors, in the words of the wire; of a kind that does not
    matter.
    """
    return BundleSpec(Kind.ACK, {name: spec_of(x.dtype, *x.shape) for name, x in tensors.items()})


@dataclass(frozen=True)
class Chains:
    """Both directions of an exchange, at ``party``."""

    up: Chain
    down: Chain
    party: str = ""

    def state(self) -> list[list[dict[str, Any] | None]] | None:
        """Returns the state of both; None if neither has any."""
        states = [self.up.state(), self.down.state()]
        return states if any(own is not None for state in states for own in state) else None

    def load_state(self, states: Sequence[Sequence[dict[str, Any] | None]]) -> None:
        """Restores what ``state`` returned."""
        self.up.load_state(states[0])
        self.down.load_state(states[1])
