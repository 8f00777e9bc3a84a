"""Chain: the filters of one direction of an exchange, applied at the sender and undone at the
receiver.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from vfl_party.base.plugins import describe_failure
from vfl_party.outbound.declared import spec_of
from vfl_party.outbound.filter import NOWHERE, Filter, OutboundBundle, Passage, Tensors

log = logging.getLogger(__name__)

# Replaces the digest after different tensors have left for the same step and receiver.
_SEVERAL = b""
# This number of digests takes about 50 MB. Old ones may be dropped, because a rollback goes back
# only a few checkpoints.
_MAX_MESSAGES = 200_000


class Chain:
    """The filters of one direction of an exchange, in the order in which they are applied. They do
    not change after the chain is made.

    ``codec``: the last filter, if there is a codec. ``sent``: the digests of what this party has
    sent before; None: no digests are kept. ``way``: the name of the exchange and direction in these
    digests.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        codec: Filter | None = None,
        sent: SentDigests | None = None,
        way: str = "",
    ) -> None:
        self.filters = (*filters, *([codec] if codec is not None else []))
        self._has_codec = codec is not None
        # The names of all tensors that the filters need and that are not sent, such as labels.
        self.knows = frozenset(name for filter_ in self.filters for name in filter_.knows)
        # Filters that change nothing are not called, to save time at every step.
        self._applied_filters = [
            filter_ for filter_ in self.filters if _overrides(filter_, "apply")
        ]
        self._undo_places = [
            place
            for place, filter_ in reversed([*enumerate(self.filters)])
            if _overrides(filter_, "undo")
        ]
        self._checking_filters = [
            filter_ for filter_ in self.filters if type(filter_).leaves is not Filter.leaves
        ]
        self._noisy_filters = (
            [filter_ for filter_ in self.filters if filter_.draws] if sent is not None else []
        )
        self._sent, self._way = sent, way
        # {id of a spec: the spec, then the spec after each filter}. The reference to the spec keeps
        # Python from reusing its id.
        self._stages_by_id: dict[int, tuple[BundleSpec, ...]] = {}
        # The dtypes and shapes for which the result of ``apply`` has matched ``wire_spec``.
        self._checked_signatures: set[tuple[Any, ...]] = set()

    def apply(self, tensors: Tensors, at: Passage = NOWHERE) -> Tensors:
        """Applies all filters and returns the tensors to send. Raises VflError if a filter
        refuses.
        """
        if not self._applied_filters:
            return tensors
        tensors = changed = {name: x.detach() for name, x in tensors.items()}
        if self._noisy_filters and at is not NOWHERE:
            self._renew_noise(at, tensors)
        for filter_ in self._applied_filters:
            before = _get_generator_states(tensors) if filter_.of_plugin else ()
            with _name_filter(filter_, "cannot be applied to what leaves"):
                changed = dict(filter_.apply_at(at, changed))
            if filter_.of_plugin and before != _get_generator_states(tensors):
                raise _draw_error(filter_)
        signature = tuple((name, x.dtype, x.shape) for name, x in tensors.items())
        if signature not in self._checked_signatures:
            self._check(_describe_tensors(tensors), changed)
            self._checked_signatures.add(signature)
        return changed

    @property
    def watches(self) -> bool:
        """Whether any filter of the chain overrides ``leaves``."""
        return bool(self._checking_filters)

    def leaves(self, leaving: OutboundBundle) -> None:
        """Has each filter check a bundle that is about to leave. Raises VflError if a filter
        refuses the bundle.
        """
        for filter_ in self._checking_filters:
            with _name_filter(filter_, "cannot check what leaves"):
                filter_.leaves(leaving)

    def _renew_noise(self, at: Passage, tensors: Tensors) -> None:
        """Draws new noise if the receiver already has different tensors with the same noise for
        this step. The difference of the two messages would be free of noise.
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
            for filter_ in self._noisy_filters:
                filter_.renew()

    def _check(self, spec: BundleSpec, tensors: Tensors) -> None:
        """Raises InputError if ``tensors``, which the filters made from tensors of ``spec``, do not
        match the chain's ``wire_spec``.
        """
        declared, sent = self._declare(spec)[-1].tensors, _describe_tensors(tensors).tensors
        for name in sorted(declared.keys() | sent.keys()):
            declared_spec, sent_spec = declared.get(name), sent.get(name)
            if declared_spec != sent_spec:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self}: tensor {name!r} leaves as {sent_spec or 'nothing'}, but wire_spec "
                    f"declares {declared_spec or 'nothing'}. Keep the tensor's shape and dtype, or "
                    "declare the new ones in wire_spec of the plug-in's Filter.",
                )

    def undo(
        self, tensors: dict[str, Tensor], at: Passage = NOWHERE, spec: BundleSpec | None = None
    ) -> dict[str, Tensor]:
        """Undoes all filters at the receiver and returns the tensors. ``spec``: the spec of the
        tensors that the sender gave to ``apply``.

        Raises VflError, and PeerError if ``apply`` cannot have made the tensors.
        """
        if not self._undo_places:
            return tensors
        return self._undo_filters(self._undo_places, tensors, at, spec)

    @property
    def undoes_on_host(self) -> bool:
        """Whether the first filter to be undone works on the host, before tensors are copied to a
        GPU.
        """
        return bool(self._undo_places) and self.filters[self._undo_places[0]].on_host

    def undo_first(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        """Undoes the filter that was applied last. Raises as ``undo``."""
        return self._undo_filters(self._undo_places[:1], tensors, at, spec)

    def undo_rest(
        self, tensors: dict[str, Tensor], at: Passage, spec: BundleSpec
    ) -> dict[str, Tensor]:
        """Undoes all filters except the one that was applied last. Raises as ``undo``."""
        return self._undo_filters(self._undo_places[1:], tensors, at, spec)

    @property
    def repeats(self) -> bool:
        """Whether the chain sends the same values to every receiver when it gets the same tensors
        at the same step.
        """
        return all(filter_.repeats for filter_ in self._applied_filters)

    def _undo_filters(
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
        """Returns the spec on the wire of tensors that have ``spec`` before the chain."""
        return self._stages(spec)[-1]

    def before_codec(self, spec: BundleSpec) -> BundleSpec:
        """Returns the spec, after all filters except the codec, of tensors that have ``spec``
        before the chain.
        """
        return self._stages(spec)[-2 if self._has_codec else -1]

    def _stages(self, spec: BundleSpec) -> tuple[BundleSpec, ...]:
        """Returns ``spec``, followed by the spec after each filter."""
        stages = self._stages_by_id.get(id(spec))
        if stages is None:
            stages = self._stages_by_id[id(spec)] = self._declare(spec)
        return stages

    def _declare(self, spec: BundleSpec) -> tuple[BundleSpec, ...]:
        stages = [spec]
        for filter_ in self.filters:
            with _name_filter(filter_, "cannot give the spec of what leaves"):
                declared = filter_.wire_spec(stages[-1])
                if not isinstance(declared, BundleSpec):
                    raise TypeError(
                        f"wire_spec returns a {type(declared).__name__}, not a BundleSpec"
                    )
                stages.append(declared)
        return tuple(stages)

    @property
    def costs(self) -> Mechanism | None:
        """The privacy cost of one tensor for a row in it; None if no filter is differentially
        private.
        """
        return next((filter_.costs for filter_ in self.filters if filter_.costs is not None), None)

    def tell(self, beside: Tensors) -> None:
        """Passes tensors that are not sent, such as labels of the next rows, to each filter; see
        ``Filter.tell``.
        """
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


def _overrides(filter_: Filter, method_name: str) -> bool:
    """Whether a filter overrides ``apply`` or ``apply_at`` (or ``undo`` or ``undo_at``, by
    ``method_name``).
    """
    return any(
        getattr(type(filter_), name) is not getattr(Filter, name)
        for name in (method_name, f"{method_name}_at")
    )


def _get_generator_states(tensors: Tensors) -> tuple[object, ...]:
    """Returns the states of torch's generators on the CPU and on the devices of ``tensors``. A
    change shows that a filter has drawn from them.
    """
    devices = dict.fromkeys(x.device for x in tensors.values() if x.is_cuda)
    states = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
    return tuple(state.numpy().tobytes() for state in states)


def _draw_error(filter_: Filter) -> InputError:
    """Returns the error of a transform that draws from torch's generators, whose seed every peer
    can derive from the recipe's.
    """
    return InputError(
        Code.CONFIG_INVALID,
        f"{filter_.text}: the transform draws from torch's generator, which every peer can repeat "
        "from the recipe's seed. Derive it from vfl.api.NoisyFilter, and draw from self._random.",
    )


@contextlib.contextmanager
def _name_filter(filter_: Filter, problem: str) -> Iterator[None]:
    """Converts an error of a filter, which may be a plug-in, to an InputError with the filter's
    name.
    """
    try:
        yield
    except VflError:
        raise
    except Exception as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{filter_.text} {problem}: it failed {describe_failure(error)}. Correct the plug-in, "
            "or remove it.",
        ) from error


def _describe_tensors(tensors: Tensors) -> BundleSpec:
    """Returns a spec with the dtypes and shapes of tensors. Its kind is a placeholder."""
    return BundleSpec(Kind.ACK, {name: spec_of(x.dtype, *x.shape) for name, x in tensors.items()})


@dataclass(frozen=True)
class Chains:
    """The chains of both directions of an exchange, at ``party``."""

    up: Chain
    down: Chain
    party: str = ""

    def state(self) -> list[list[dict[str, Any] | None]] | None:
        """Returns the state of both chains; None if no filter has a state."""
        states = [self.up.state(), self.down.state()]
        return (
            states
            if any(filter_state is not None for state in states for filter_state in state)
            else None
        )

    def load_state(self, states: Sequence[Sequence[dict[str, Any] | None]]) -> None:
        """Restores what ``state`` returned."""
        self.up.load_state(states[0])
        self.down.load_state(states[1])


class SentDigests:
    """Keeps digests of what has left through noisy chains, in memory, for all generations of a
    process.

    A resumed run repeats the noise of its checkpoint, so that it ends bit for bit as it would have
    without the interruption. That noise protects only one message. A peer could stop on purpose and
    then send different embeddings, to get a second message with the same noise. The difference of
    the two has no noise.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, Passage], bytes] = {}

    def differs(self, way: str, at: Passage, tensors: Tensors) -> bool:
        """Stores the digest of the tensors of the bundle ``at`` and returns whether different
        tensors have ever left for the same step and receiver.

        After one difference the result stays true, because it is no longer known which of the
        tensors had the noise that would come next. ``way``: the name of the exchange and direction.
        """
        digest = hashlib.sha256()
        for name, x in sorted(tensors.items()):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
            digest.update(
                x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        current, key = digest.digest(), (way, at)
        is_same = self._digests.pop(key, current) == current
        # ``pop`` and this assignment put the newest digest last, so the oldest is dropped first.
        self._digests[key] = current if is_same else _SEVERAL
        if len(self._digests) > _MAX_MESSAGES:
            del self._digests[next(iter(self._digests))]
        return not is_same
