"""Parties that join properly, or almost, and then send whatever a test wants."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt
import torch

from tests.harness.federation import Federation
from tests.harness.present import present
from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, Ledger, StepKey, TensorSpec
from vfl_common.config.data import DataSettings
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.ask import LogHeads
from vfl_common.rpc.channel import dial
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.link import ExchangeLink, LinkEnds
from vfl_common.rpc.messages import Joining, Start
from vfl_common.rpc.session import Session
from vfl_common.stages import AggregationPlan
from vfl_party.align.digest import compute_rows_digest
from vfl_party.data import load_table
from vfl_party.outbound.exchange import to_bundle, to_tensors
from vfl_party.record.book import RecordBook
from vfl_party.record.heads import HeadExchange

DTYPES = {np.dtype(np.float32): DType.FLOAT32, np.dtype(np.float16): DType.FLOAT16}


class HostilePassive:
    """A passive party that uses the real session and link, in the test's own process."""

    def __init__(self, federation: Federation, name: str) -> None:
        folder = federation.folder
        self.name, self._recipe = name, load_recipe(folder / "recipe.toml")
        self._keyring = Keyring(
            TlsSettings(
                ca=str(folder / "certs/ca.pem"),
                certificate=str(folder / f"certs/{name}.pem"),
                key=str(folder / f"certs/{name}.key"),
            ),
            name,
        )
        self._data = DataSettings(**federation.data[name])
        self.ledger = Ledger()
        self.session = Session(
            federation.address,
            self._keyring,
            "server",
            self.ledger,
            TcpMeter(),
            heartbeat_s=0.5,
            wait_s=20.0,
        )
        self.link: ExchangeLink | None = None
        self._book = RecordBook(folder / f"record-of-a-hostile-{name}", name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.link is not None:
            self.link.close()
        self.session.close()
        self._book.close()

    def dial(self, address: str, peer: str) -> grpc.Channel:
        """Opens a connection of its own to ``peer``, with this party's certificate."""
        return dial(address, self._keyring.current(), peer)

    def join_with(self, **facts: Any) -> Start:
        """Joins with these facts beside the usual ones, and waits for the others."""
        joining = Joining("passive", self._recipe.canonical_json(), "train", os.getpid(), "cpu")
        start = self.session.join(replace(joining, **facts))
        assert isinstance(start, Start)
        return start

    def join_and_open(self) -> None:
        """Joins, attaches to the active party, and shows the right rows."""
        start = self.join_with()
        self.link = ExchangeLink(
            lambda: self.dial(start.exchange_address, "p0"),
            LinkEnds(self.name, "p0", start.run_id, start.generation),
            self.ledger,
            reconnect_s=10.0,
            timeout_s=30.0,
        )
        self.show_record()
        ids = load_table(self._data, with_label=False).ids
        digest = torch.frombuffer(
            bytearray(compute_rows_digest(start.run_id, ids)), dtype=torch.uint8
        )
        rows = to_bundle(Kind.ROWS, {"count": torch.tensor([len(ids)]), "digest": digest})
        self.link.swap(StepKey("open", 0, 0), rows, BundleSpec(Kind.ACK))

    def show_record(self) -> None:
        """Shows the active party a record, without which it gives nobody anything."""
        link = present(self.link)

        def ask(shows: LogHeads) -> LogHeads:
            answer = present(link.confer(shows.encode()))
            return LogHeads.decode(answer, party="p0", me=self.name)

        HeadExchange(self._book, self._keyring.current).confer("p0", ask)

    def send(self, message: control_pb2.PartyMessage) -> None:
        """Sends the server any message in the party's session."""
        self.session._send(message)

    def bundle(self, z: npt.NDArray[Any]) -> Bundle:
        """Makes an embedding bundle of any array."""
        return Bundle(
            Kind.EMBEDDING, {"z": Buffer(DTYPES[z.dtype], z.shape, memoryview(z.tobytes()))}
        )

    def swap_expecting_failure(self, bundle: Bundle) -> VflError:
        """Sends the first step's embedding; returns the failure that comes back."""
        try:
            present(self.link).swap(StepKey("splitnn", 0, 0), bundle, BundleSpec(Kind.ACK))
        except VflError as error:
            return error
        raise AssertionError("the active party took it")


class AggregatingMember(HostilePassive):
    """Any party of a run that aggregates: it sends the server what a test gives it, and nothing to
    anybody else.
    """

    def __init__(self, federation: Federation, name: str) -> None:
        super().__init__(federation, name)
        self._endings: queue.SimpleQueue[VflError] = queue.SimpleQueue()

    def join(
        self, *aggregations: AggregationPlan, checkpoints: tuple[str, ...] = ("",), run_id: str = ""
    ) -> Start:
        """Joins, waits for the others, and opens ``link``, to the server's exchange."""
        place = present(self._recipe.party(self.name))
        start = self.session.join(
            Joining(
                place.role,
                self._recipe.canonical_json(),
                "train",
                os.getpid(),
                "cpu",
                run_id=run_id,
                checkpoints=checkpoints,
                exchange_address="127.0.0.1:1" if place.role == "active" else "",
            )
        )
        assert isinstance(start, Start)
        if self.link is not None:
            self.link.close()
        self.link = self.link_to(self.session.address, "server", start)
        self.session.watch(self._end)
        self.session.plan(aggregations)
        return start

    def _end(self, error: VflError) -> None:
        self._endings.put(error)
        if self.link is not None:
            self.link.end(error)

    def ended(self) -> VflError:
        """Waits until the generation, or the session, ends; returns the error that ended it."""
        return self._endings.get(timeout=30.0)

    def vanish(self) -> None:
        """Breaks the connection as if the process had died."""
        self.session._uplink.closed.set()
        self.session._uplink.disconnect()

    def link_to(
        self, address: str, peer: str, start: Start, *, reconnect_s: float = 10.0
    ) -> ExchangeLink:
        return ExchangeLink(
            lambda: self.dial(address, peer),
            LinkEnds(self.name, peer, start.run_id, start.generation),
            self.ledger,
            reconnect_s=reconnect_s,
            timeout_s=30.0,
        )

    def swap(
        self, aggregation: AggregationPlan, round_: int, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the mean of ``values``, whatever they are, with the others'."""
        step = StepKey(aggregation.phase, round_, 0)
        bundle = present(self.link).swap(step, to_bundle(Kind.WEIGHTS, values), aggregation.spec)
        return to_tensors(bundle, torch.device("cpu"))


def first_answer(call: Iterator[bytes], answers: queue.SimpleQueue[bytes]) -> None:
    """Puts the first answer to a call into ``answers``, unless the call ends without one."""
    with contextlib.suppress(grpc.RpcError, StopIteration):
        answers.put(next(call))


def aggregation(phase: str, rounds: int, **shapes: tuple[int, ...]) -> AggregationPlan:
    """Declares float32 tensors of these shapes."""
    tensors = {name: TensorSpec(DType.FLOAT32, shape) for name, shape in shapes.items()}
    return AggregationPlan(phase, rounds, BundleSpec(Kind.WEIGHTS, tensors))
