"""The one way out of a party: what a phase declares goes through its chain, as bundles, over a link
or a hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey
from vfl_common.errors import Code, InputError, InternalError, PeerError
from vfl_common.link import Hub, Lenience, Link, StepPassed
from vfl_party.base.dtypes import TORCH, WIRE
from vfl_party.base.step_timing import DECODE, ENCODE, WAIT, Clock, spends
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import NOTHING, Exchange, Sent
from vfl_party.outbound.filter import OutboundBundle, Passage, Tensors
from vfl_party.record.lines import ALL, NOBODY
from vfl_party.record.recorder import Recorder


class Connections(Protocol):
    """The links and the hub of one generation; a phase looks them up when it runs."""

    @property
    def link(self) -> Link | None:
        """Connects to the active party; None at the active party."""
        ...

    @property
    def hub(self) -> Hub | None:
        """Answers the passive parties; None at a passive party."""
        ...

    @property
    def server(self) -> Link | None:
        """Connects to the aggregation server; None if no phase of the run aggregates."""
        ...

    @property
    def clock(self) -> Clock:
        """Divides this party's time among encoding, waiting, decoding and computing."""
        ...

    @property
    def protocol(self) -> int:
        """The protocol that all parties speak in this generation: this release's, or that of the
        release before.
        """
        ...

    @property
    def record(self) -> Recorder | None:
        """Writes down what leaves, before it does; None if nothing leaves this process."""
        ...


# The rows that a bundle tells of: their numbers; ``ALL``; None: no single rows.
About: TypeAlias = "Sequence[int] | npt.NDArray[Any] | str | None"


class _Side:
    """The base of both sides of one exchange of a phase; tensors arrive on ``device``, checked
    to be finite.
    """

    def __init__(
        self,
        exchange: Exchange,
        phase: str,
        chains: Chains,
        connections: Connections,
        device: torch.device,
        sizes: Mapping[str, int],
    ) -> None:
        self.exchange, self.phase, self.chains = exchange, phase, chains
        self._connections, self._device, self._sizes = connections, device, sizes
        # What the record says of a direction, by the number of tensors: the same at every step.
        self._words: dict[tuple[bool, int], tuple[str, ...]] = {}
        self._specs: dict[tuple[tuple[str, int], ...], _Specs] = {}

    @property
    def clock(self) -> Clock:
        """Returns the clock of this generation."""
        return self._connections.clock

    def _expect_specs(self, sent: Sent, chain: Chain, sizes: Mapping[str, int]) -> _Specs:
        """Returns the specs of what arrives with these sizes; a phase has few, for thousands of
        steps.
        """
        key = tuple(sizes.items())
        known = self._specs.get(key)
        if known is None:
            spec = self.exchange.spec(sent, self.phase, {**self._sizes, **sizes})
            known = self._specs[key] = _Specs(spec, chain.wire_spec(spec))
        return known

    def _record(
        self,
        step: StepKey,
        bundle: Bundle,
        tensors: Tensors,
        to: Sequence[str],
        about: About,
        *,
        up: bool,
    ) -> None:
        """Asks the chain whether ``bundle``, made of ``tensors``, may leave, and writes that it is
        about to. Raises InputError if it may not, or if that cannot be written.
        """
        record = self._connections.record
        sent, chain = _direction(self.exchange, self.chains, up=up)
        if record is None and not chain.watches:
            return
        if about is None and sent.about_rows:
            about = ALL
        numbers = sum(x.numel() for x in tensors.values())
        if tensors and chain.watches:
            people = len(about) if _is_listed(about) else _rows_in(sent, tensors) * (about is ALL)
            payload = sum(buffer.data.nbytes for buffer in bundle.tensors.values())
            leaving = OutboundBundle(step, bundle.kind.label, to, numbers, payload, about, people)
            chain.leaves(leaving)
        if record is None:
            return
        words = self._words.get((up, len(tensors)))
        if words is None:
            words = way_of(self.exchange, self.chains, len(tensors), up=up)
            self._words[up, len(tensors)] = words
        record.leaves(words, step, bundle, to, numbers=numbers, rows=about)


def way_of(exchange: Exchange, chains: Chains, tensors: int, *, up: bool) -> tuple[str, ...]:
    """Returns what the record says of one direction of an exchange; see ``Recorder.leaves``.

    ``tensors``: of a bundle; each of them tells of its rows.
    """
    sent, chain = _direction(exchange, chains, up=up)
    costs = chain.costs
    cost = replace(costs, times=costs.times * tensors).text if costs and tensors else ""
    return exchange.name, "up" if up else "down", str(sent), str(chain), sent.how, cost


def _direction(exchange: Exchange, chains: Chains, *, up: bool) -> tuple[Sent, Chain]:
    return (exchange.up, chains.up) if up else (exchange.down, chains.down)


def _rows_in(sent: Sent, tensors: Tensors) -> int:
    """Returns the number of rows in tensors that are declared with rows."""
    sizes = (
        len(tensors[name]) for name, (_, shape) in sent.tensors.items() if shape[:1] == ("rows",)
    )
    return next(sizes, 0)


def _is_listed(about: About) -> TypeGuard[Sequence[int] | npt.NDArray[Any]]:
    """Returns whether rows are listed by number."""
    return about is not None and not isinstance(about, str)


class _Specs(NamedTuple):
    """The spec of tensors before their sender's chain, and as they cross the wire."""

    meant: BundleSpec
    wire: BundleSpec


class Asking(_Side):
    """The asking side of one exchange of a phase."""

    def __init__(
        self,
        exchange: Exchange,
        phase: str,
        chains: Chains,
        connections: Connections,
        peer: str,
        device: torch.device,
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(exchange, phase, chains, connections, device, sizes)
        self.peer = peer
        # The peer may go on without this party, which then gets StepPassed.
        self.lenient = False

    @property
    def link(self) -> Link:
        """Returns the link. Raises InputError if there is none: the active party asks only the
        server.
        """
        link = (
            self._connections.server if self.exchange.asks == "server" else self._connections.link
        )
        if link is None:
            raise InputError(
                Code.ROLE_MISMATCH,
                f"{self.exchange.name}: this party has no link to {self.peer}. Open the exchange "
                "only at a party that asks.",
            )
        return link

    def swap(
        self, step: StepKey, tensors: Tensors, about: About = None, **sizes: int
    ) -> dict[str, Tensor]:
        """Calls ``send``, then ``receive``."""
        self.send(step, tensors, about)
        return self.receive(step, **sizes)

    @spends(WAIT)
    def give(self, step: StepKey, tensors: Tensors, ready: Callable[[], None]) -> None:
        """Sends ``tensors``, and waits for an acknowledgement instead of an answer.

        ``ready``: called before anything leaves, when the chain has changed all that it will.
        Raises as ``swap``.
        """
        leaves = self.chains.up.apply(tensors, Passage(step, self.chains.party, self.peer))
        ready()
        bundle = to_bundle(self.exchange.up.kind, leaves)
        self._record(step, bundle, tensors, (self.peer,), None, up=True)
        self.link.send(step, bundle)
        self._receive(step, NOTHING.spec())

    def take(self, step: StepKey, **sizes: int) -> dict[str, Tensor]:
        """Asks without sending anything, and waits for the answer as long as the peers live.
        Raises as ``swap``.
        """
        bundle = Bundle(Kind.ACK)
        self._record(step, bundle, {}, (self.peer,), NOBODY, up=True)
        self.link.send(step, bundle)
        self.link.unhurried()
        return self.receive(step, **sizes)

    def send(self, step: StepKey, tensors: Tensors, about: About = None) -> None:
        """Sends ``tensors`` (without their graph); they may be changed afterwards. Raises as
        ``Link.send``.

        ``about``: the numbers of the rows that they tell of, for the party's record.
        """
        wait_for_gpus(tensors)
        self._send(step, tensors, about)

    @spends(ENCODE)
    def _send(self, step: StepKey, tensors: Tensors, about: About) -> None:
        at = Passage(step, self.chains.party, self.peer)
        leaves = self.chains.up.apply(tensors, at)
        bundle = to_bundle(self.exchange.up.kind, leaves)
        self._record(step, bundle, tensors, (self.peer,), about, up=True)
        self.link.send(step, bundle)

    @spends(WAIT)
    def receive(self, step: StepKey, **sizes: int) -> dict[str, Tensor]:
        """Waits for the reply and returns the peer's tensors, without gradient. Raises as
        ``Link.receive``.
        """
        spec, wire = self._expect_specs(self.exchange.down, self.chains.down, sizes)
        bundle = self._receive(step, wire)
        self.clock.to(DECODE)
        at = Passage(step, self.peer, self.chains.party)
        return _unpack_arrival(self.chains.down, bundle, at, spec, self._device)

    def _receive(self, step: StepKey, wire: BundleSpec) -> Bundle:
        try:
            return self.link.receive(step, wire)
        except StepPassed as passed:
            if self.lenient:
                raise
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{self.peer}: {passed.now} is already under way, but {step} cannot complete "
                "without this party.",
                party=self.peer,
            ) from None


class Answering(_Side):
    """The computing side of one exchange of a phase.

    ``sizes``: those that are the same at every step; one that the asking parties need not share is
    {party: its size}.
    """

    def __init__(
        self,
        exchange: Exchange,
        phase: str,
        chains: Chains,
        connections: Connections,
        device: torch.device,
        sizes: Mapping[str, int | Mapping[str, int]],
    ) -> None:
        common: dict[str, int] = {}
        # {party: its own sizes}; empty if all parties have the same, which is checked faster.
        self._own: dict[str, dict[str, int]] = {}
        for word, size in sizes.items():
            if not isinstance(size, Mapping):
                common[word] = size
            elif len(distinct := set(size.values())) == 1:
                common[word] = distinct.pop()
            else:
                for party, own in size.items():
                    self._own.setdefault(party, {})[word] = own
        super().__init__(exchange, phase, chains, connections, device, common)

    @property
    def hub(self) -> Hub:
        """Returns the hub. Raises InputError at a passive party."""
        if self._connections.hub is None:
            raise InputError(
                Code.ROLE_MISMATCH,
                f"{self.exchange.name}: this party is not the active party. Answer the exchange "
                "only at the active party.",
            )
        return self._connections.hub

    @spends(WAIT)
    def collect(
        self,
        step: StepKey,
        *,
        deadline_s: float = math.inf,
        lenience: Lenience | None = None,
        each: Mapping[str, Mapping[str, int]] | None = None,
        **sizes: int,
    ) -> dict[str, dict[str, Tensor]]:
        """Returns {party: its tensors}, without gradient, in roster order and without late parties.

        ``each``: {party that sends: its own sizes}; None if all parties send tensors of the same
        sizes.

        Raises as ``Hub.collect``.
        """
        sent, up = self.exchange.up, self.chains.up
        if self._own:
            asked = {name: {} for name in self._own} if each is None else each
            each = {name: {**self._own[name], **own} for name, own in asked.items()}
        received: dict[str, dict[str, Tensor]] = {}
        same = self._expect_specs(sent, up, sizes) if each is None else None
        specs = {
            name: self._expect_specs(sent, up, {**sizes, **own})
            for name, own in (each or {}).items()
        }

        def receive(party: str, bundle: Bundle) -> None:
            self.clock.to(DECODE)
            spec = (same or specs[party]).meant
            at = Passage(step, party, self.chains.party)
            received[party] = _unpack_arrival(up, bundle, at, spec, self._device)
            self.clock.to(WAIT)

        wire = same.wire if same is not None else {name: specs[name].wire for name in specs}

        return {
            party: received[party]
            for party in self.hub.collect(step, wire, receive, deadline_s, lenience)
        }

    def reply(
        self,
        step: StepKey,
        tensors: Mapping[str, Tensors],
        beside: Mapping[str, Tensors] = MappingProxyType({}),
        about: About | Mapping[str, About] = None,
    ) -> None:
        """Answers each party with its own tensors; those that are the same objects for several are
        encoded once.

        ``beside``: {party: what the chain may know of its rows}; it is not sent. ``about``: the
        numbers of the rows that the answers tell of, for the party's record; {party: rows} if
        these differ.
        """
        for own in tensors.values():
            wait_for_gpus(own)
        self._reply(step, tensors, beside, about)

    @spends(ENCODE)
    def _reply(
        self,
        step: StepKey,
        tensors: Mapping[str, Tensors],
        beside: Mapping[str, Tensors],
        about: About | Mapping[str, About],
    ) -> None:
        down, kind, repeats = self.chains.down, self.exchange.down.kind, self.chains.down.repeats
        replies: dict[str, Bundle] = {}
        # {ids of the tensors given to the chain: what the chain returned}.
        made: dict[_Ids, Tensors] = {}
        # Holds the tensors, so that no id is reused.
        encoded: dict[_Ids, tuple[Tensors, Bundle]] = {}
        for party, own in tensors.items():
            if party in beside:
                down.tell(beside[party])
            ids = _ids(own)
            if ids not in made or not repeats:
                made[ids] = down.apply(own, Passage(step, self.chains.party, party))
            ready = made[ids]
            key = ids if ready is own else _ids(ready)
            if key not in encoded:
                encoded[key] = ready, to_bundle(kind, ready)
            replies[party] = encoded[key][1]
        # The record gets a line for each bundle before any of them leaves.
        to: dict[int, list[str]] = {}
        for party, bundle in replies.items():
            to.setdefault(id(bundle), []).append(party)
        for parties in to.values():
            first = parties[0]
            rows = about[first] if isinstance(about, Mapping) else about
            self._record(step, replies[first], tensors[first], parties, rows, up=False)
        self.hub.reply(step, replies)

    @spends(ENCODE)
    def reply_all(
        self, step: StepKey, parties: Iterable[str], tensors: Tensors, about: About = None
    ) -> None:
        """Answers all ``parties`` with the same tensors, which go through the chain once.
        ``about``: see ``reply``.
        """
        at, to = Passage(step, self.chains.party, ""), [*parties]
        bundle = to_bundle(self.exchange.down.kind, self.chains.down.apply(tensors, at))
        self._record(step, bundle, tensors, to, about, up=False)
        self.hub.reply(step, dict.fromkeys(to, bundle))

    @spends(ENCODE)
    def acknowledge(self, step: StepKey, parties: Iterable[str]) -> None:
        """Answers all ``parties`` with an empty acknowledgement."""
        bundle, to = Bundle(Kind.ACK), [*parties]
        self._record(step, bundle, {}, to, NOBODY, up=False)
        self.hub.reply(step, dict.fromkeys(to, bundle))


_Ids: TypeAlias = tuple[tuple[str, int], ...]


def _ids(tensors: Tensors) -> _Ids:
    """Tells the same tensors, under the same names, from others."""
    return tuple((name, id(x)) for name, x in tensors.items())


def _unpack_arrival(
    chain: Chain, bundle: Bundle, at: Passage, spec: BundleSpec, device: torch.device
) -> dict[str, Tensor]:
    """Returns the tensors that were ``spec`` before the chain, on ``device``. Raises as ``take_in``
    and ``Chain.undo``.

    What the last filter did is undone on the host, if it wants that, and then the result is copied
    to a GPU.
    """
    if not chain.undoes_on_host:
        return chain.undo(take_in(bundle, device, party=at.sender, step=at.step), at, spec)
    host = take_in(bundle, torch.device("cpu"), party=at.sender, step=at.step)
    return chain.undo_rest(_move(chain.undo_first(host, at, spec), device), at, spec)


# -- tensors to and from bundles
# ----------------------------------------------------------------------


def to_bundle(kind: Kind, tensors: Mapping[str, Tensor]) -> Bundle:
    """Makes a bundle of ``tensors``, without their graph. Raises InternalError if the wire lacks a
    tensor's dtype.

    The buffer of a contiguous CPU tensor is the tensor's own memory: a later change of the tensor
    in place changes the bundle, so encode or clone first. Tensors of a GPU go through pinned host
    memory: the copies run one after the other, behind the kernels that compute them. The host waits
    once, for all copies, because a buffer must be complete before it is encoded.
    """
    host, streams = {}, set()
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host[name].copy_(tensor.detach(), non_blocking=True)
            streams.add(torch.cuda.current_stream(tensor.device))
        else:
            host[name] = tensor.detach().contiguous()
    for stream in streams:
        stream.synchronize()
    return Bundle(kind, {name: _buffer(tensor) for name, tensor in host.items()})


def wait_for_gpus(tensors: Tensors) -> None:
    """Waits until ``tensors`` are computed: GPU kernels run asynchronously, and their time counts
    as computing, not as encoding.
    """
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def to_tensors(bundle: Bundle, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a bundle on ``device``, without gradient.

    On the CPU a tensor is a view of a writable buffer; a read-only or unaligned buffer, or one of
    bools, is copied. A GPU gets copies, and the buffers may be reused when this returns.
    """
    return _move({name: _view(buffer) for name, buffer in bundle.tensors.items()}, device)


def take_in(
    bundle: Bundle, device: torch.device, *, party: str, step: StepKey
) -> dict[str, Tensor]:
    """Returns ``to_tensors`` of what a peer has sent. Raises PeerError as ``check_finite``.

    The check comes before the copy to a GPU: there, every check would wait for all that the GPU has
    to do.
    """
    host = {name: _view(buffer) for name, buffer in bundle.tensors.items()}
    check_finite(host, party=party, step=step)
    return _move(host, device)


def nonfinite(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` holds a NaN or an infinity; exact.

    NaN and infinity survive a sum, so a finite sum proves that all elements are finite (2 µs for 64
    KiB of float32, 35 µs for 4 MiB). The sum of finite values may overflow; then every element is
    checked.
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return False
    return not bool(torch.isfinite(tensor).all())


def check_finite(tensors: Mapping[str, Tensor], *, party: str, step: StepKey) -> None:
    """Raises PeerError (NON_FINITE), naming party, tensor and step, if a tensor holds NaN or
    infinity.
    """
    for name, tensor in tensors.items():
        if nonfinite(tensor):
            raise PeerError(
                Code.NON_FINITE,
                f"tensor {name[:40]!r} of {party} at {step} contains NaN or infinity",
                party=party,
            )


def _buffer(tensor: Tensor) -> Buffer:
    dtype = WIRE.get(tensor.dtype)
    if dtype is None:
        raise InternalError(
            f"a tensor of {tensor.dtype} cannot be sent; the wire supports "
            f"{', '.join(map(str, WIRE))}"
        )
    # Numpy has no such dtype.
    if dtype is DType.BFLOAT16:
        raw = tensor.view(torch.int16).numpy().data
    else:
        raw = tensor.numpy().data
    return Buffer(dtype, tuple(tensor.shape), raw.cast("B") if raw.nbytes else memoryview(b""))


def _view(buffer: Buffer) -> Tensor:
    dtype, data = TORCH[buffer.dtype], buffer.data
    if not data.nbytes:
        return torch.empty(buffer.shape, dtype=dtype)
    if data.readonly:
        data = memoryview(bytearray(data))
    # A byte other than 0 and 1 would be undefined behaviour.
    if dtype is torch.bool:
        return (torch.frombuffer(data, dtype=torch.uint8) != 0).view(buffer.shape)
    flat = torch.frombuffer(data, dtype=dtype)
    return (flat.clone() if flat.data_ptr() % dtype.itemsize else flat).view(buffer.shape)


def _move(host: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies to a GPU on a separate stream, while kernels run.

    Three orders are kept. Later kernels wait for the copies (``wait_stream``). The memory of a copy
    is not reused before the kernels that read it are done (``record_stream``): torch knows only the
    stream that took it. The host waits for the copies, not for the kernels: afterwards the wire may
    reuse the buffers.
    """
    if device.type != "cuda" or not host:
        return host
    kernels, copies = torch.cuda.current_stream(device), _copies(device)
    with torch.cuda.stream(copies):
        # Returns the same tensor if it is pinned already.
        pinned = [tensor.pin_memory() for tensor in host.values()]
        moved = [tensor.to(device, non_blocking=True) for tensor in pinned]
    kernels.wait_stream(copies)
    for tensor in moved:
        tensor.record_stream(kernels)
    copies.synchronize()
    return dict(zip(host, moved, strict=True))


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream for copies to a GPU; only the main thread uses it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
