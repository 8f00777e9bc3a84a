"""Declares what a phase exchanges, with symbolic shapes, before anything runs.

The receiver's spec, the forecast, the weights that the server averages, and the table of what
leaves a party are derived from a declaration. The declaration also fixes the chain through which
tensors leave: transform -> policy -> codec -> frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import torch

from vfl_common.bundle import BundleSpec, Kind, StepKey, TensorSpec
from vfl_common.config.base import parse
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_common.stages import Draw
from vfl_party.base.devices import WIRE, get_real_dtype
from vfl_party.base.plugins import describe_failure
from vfl_party.outbound import transforms
from vfl_party.outbound.filter import Filter, Passage, Tensors

Role = Literal["active", "passive"]
# A word, such as "rows" or "width", stands for a size that is known when the tensor is sent.
Shape = tuple[int | str, ...]
Declared = tuple[torch.dtype, Shape]


def spec_of(dtype: torch.dtype, *shape: int) -> TensorSpec:
    """Returns the spec of a tensor of this dtype and shape. Raises InternalError if the wire lacks
    the dtype.
    """
    if dtype not in WIRE:
        raise InternalError(
            f"a tensor of {dtype} cannot be sent; the wire supports {', '.join(map(str, WIRE))}"
        )
    return TensorSpec(WIRE[dtype], shape)


def f32(*shape: int | str) -> Declared:
    """Declares a float32 tensor of this shape."""
    return torch.float32, shape


def u8(*shape: int | str) -> Declared:
    """Declares a uint8 tensor of this shape."""
    return torch.uint8, shape


def i64(*shape: int | str) -> Declared:
    """Declares an int64 tensor of this shape."""
    return torch.int64, shape


@dataclass(frozen=True)
class Use:
    """A transform with its settings, as a method or a recipe requests it.

    ``role``: the role whose parties apply the transform; None: every party that sends. ``leave``:
    the names of the tensors that the transform leaves unchanged.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    role: Role | None = None
    leave: frozenset[str] = frozenset()

    def make(self, where: str) -> Filter:
        """Makes a new filter. Raises InputError that names ``where`` if the kind or its settings
        are wrong.
        """
        transform = transforms.load(self.kind, where)
        settings = parse(transform.settings, dict(self.settings), f"{where}: transform {self.kind}")
        try:
            made_filter = transforms.REGISTRY.check_type(
                transform.make(settings), self.kind, where, Filter
            )
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: transform {self.kind} cannot be created: it failed "
                f"{describe_failure(error)}. Correct the plug-in.",
            ) from error
        made_filter.of_plugin = not transforms.REGISTRY.is_ours(self.kind)
        return PartialFilter(made_filter, self.leave) if self.leave else made_filter


class PartialFilter(Filter):
    """Applies another filter to all tensors except the ones named in ``leave``."""

    def __init__(self, inner: Filter, leave: frozenset[str]) -> None:
        self._inner, self._leave = inner, leave
        self.text, self.knows, self.draws = inner.text, inner.knows, inner.draws
        self.of_plugin = inner.of_plugin

    def tell(self, beside: Tensors) -> None:
        self._inner.tell(beside)

    def apply(self, tensors: Tensors) -> Tensors:
        return self._change(self._inner.apply, tensors)

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        return self._change(partial(self._inner.apply_at, at), tensors)

    def renew(self) -> None:
        self._inner.renew()

    def undo(self, tensors: Tensors) -> Tensors:
        return self._change(self._inner.undo, tensors)

    def _change(self, change: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
        changed = change({name: x for name, x in tensors.items() if name not in self._leave})
        return {name: changed.get(name, x) for name, x in tensors.items()}

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        inner_spec = self._inner.wire_spec(spec)
        tensors = {
            name: spec.tensors[name] if name in self._leave else tensor_spec
            for name, tensor_spec in inner_spec.tensors.items()
        }
        return BundleSpec(spec.kind, tensors)

    def state(self) -> dict[str, Any] | None:
        return self._inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._inner.load_state(state)


def noise(
    kind: str, role: Role | None = None, leave: Iterable[str] = (), **settings: float
) -> tuple[Use, ...]:
    """Returns the transform ``kind``, or an empty tuple if all its settings are zero."""
    return (Use(kind, settings, role, frozenset(leave)),) if any(settings.values()) else ()


@dataclass(frozen=True, eq=False)
class Sent:
    """One direction of an exchange: named tensors of one kind, and what is done to them before they
    leave.

    ``beside``: the names of tensors that the sender passes to its chain and does not send
    (``Filter.tell``). ``how``: a text for people about what the method itself has done to the
    tensors, such as encrypting them. ``label_free``: whether tensors that the active party sends do
    not depend on labels, unless an earlier phase has trained on labels. ``rows_of``: the side whose
    rows the tensors describe. For ``receiver``, the sender has no data of the rows.
    """

    kind: Kind
    tensors: Mapping[str, Declared] = field(default_factory=dict)
    through: tuple[Use, ...] = ()
    beside: frozenset[str] = frozenset()
    how: str = ""
    label_free: bool = False
    rows_of: Literal["sender", "receiver"] = "sender"

    def spec(self, **sizes: int) -> BundleSpec:
        """Returns the spec of the tensors before codec and frames. ``sizes``: the values of the
        words in their shapes.
        """
        return _make_spec(self, tuple(sizes.items()))

    @property
    def about_rows(self) -> bool:
        """Whether a tensor of this direction has values for individual rows of the sender."""
        rows = (shape[:1] == ("rows",) for _, shape in self.tensors.values())
        return self.rows_of == "sender" and any(rows)

    def __str__(self) -> str:
        """Returns a text such as ``embedding z float32 [rows, width]``. More than three tensors are
        only counted.
        """
        if len(self.tensors) > 3:
            dtypes = dict.fromkeys(
                str(dtype).removeprefix("torch.") for dtype, _ in self.tensors.values()
            )
            return f"{self.kind.label}: {len(self.tensors)} tensors, {', '.join(dtypes)}"
        return " ".join(
            [
                self.kind.label,
                ", ".join(
                    f"{name} {_format_declared(*declared)}"
                    for name, declared in self.tensors.items()
                ),
            ]
        )


NOTHING = Sent(Kind.ACK)
# The name of an exchange under which a recipe lists the transforms of embeddings that are requested
# after training. The phases of predictions are not in the recipe.
PREDICTION = "prediction"
PREDICTS = frozenset({"predict", "serve"})


@dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange of tensors in a phase: one side asks with ``up``, the other computes and answers
    with ``down``.

    ``asks``: ``active``: every passive party asks the active party; ``server``: every party asks
    the aggregation server, which answers with the mean. ``passive``: whether only the passive
    parties ask, although the active party opens the exchange too. ``draw``: the parties that
    exchange with the server in each round; None: all parties. ``when``: a text for people.
    """

    name: str
    up: Sent
    down: Sent = NOTHING
    asks: Literal["active", "server"] = "active"
    passive: bool = False
    draw: Draw | None = None
    when: str = "every step"

    def spec(self, sent: Sent, phase: str, sizes: Mapping[str, int]) -> BundleSpec:
        """Returns ``Sent.spec`` of one direction. Raises InputError if a word in its shapes has no
        size.
        """
        try:
            return sent.spec(**sizes)
        except KeyError as missing:
            raise InputError(
                Code.CONFIG_INVALID,
                f"phase {phase}: exchange {self.name}: the word {missing} in the shapes of {sent} "
                f"has no size. Pass {missing.args[0]}= where the exchange is opened, or at each "
                "step.",
            ) from None


@dataclass(frozen=True)
class Occurrence:
    """An exchange at one step.

    ``sizes``: the values of the words in its shapes. ``party``: the party or parties that ask;
    None: all. ``empty``: the direction that carries no tensors, ``up`` or ``down``.
    """

    step: StepKey
    exchange: Exchange
    sizes: tuple[tuple[str, int], ...] = ()
    party: str | tuple[str, ...] | None = None
    empty: Literal["up", "down"] | None = None

    @classmethod
    def of(cls, exchange: Exchange, step: StepKey, **sizes: int) -> Occurrence:
        """Returns ``exchange`` at ``step``."""
        return cls(step, exchange, tuple(sizes.items()))


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a phase, in order.

    Exchanges with the same step key happen at the same time, and exchanges with different keys
    happen one after the other. Within a round, an asking party has up to ``in_flight`` steps under
    way: it sends step t + in_flight - 1 before it waits for the answer of step t. Validation begins
    when all steps have been answered.

    ``may_end_early``: whether the data may end the phase before all ``occurrences``. ``parts``: the
    number of successive steps that make one batch; all are answered before the next update.
    ``step``: the name of the exchange that a phase's step counts; empty: the first exchange.
    ``after``: a function of the number of rounds, if that is known, that returns what follows the
    last round. ``bound``: why the sizes are upper bounds; empty: they are exact.
    """

    occurrences: Iterable[Occurrence] = ()
    may_end_early: bool = False
    in_flight: int = 1
    parts: int = 1
    step: str = ""
    after: Callable[[int | None], Iterable[Occurrence]] | None = None
    bound: str = ""


# The cache saves time because a phase asks for a few shapes thousands of times.
@lru_cache(maxsize=1024)
def _make_spec(sent: Sent, sizes: tuple[tuple[str, int], ...]) -> BundleSpec:
    size_by_word = dict(sizes)
    return BundleSpec(
        sent.kind,
        {
            name: spec_of(
                get_real_dtype() if dtype is torch.float32 else dtype,
                *(size if isinstance(size, int) else size_by_word[size] for size in shape),
            )
            for name, (dtype, shape) in sent.tensors.items()
        },
    )


def _format_declared(dtype: torch.dtype, shape: Shape) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
