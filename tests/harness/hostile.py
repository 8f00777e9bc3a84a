"""A passive party that joins properly and then sends whatever a test wants."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.harness.federation import Federation
from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey
from vfl_common.config.data import DataSettings
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import VflError
from vfl_common.identity.credentials import load_credentials
from vfl_common.ledger import Ledger
from vfl_common.rpc.channel import dial
from vfl_common.rpc.link import ExchangeLink
from vfl_common.rpc.session import Joining, Session
from vfl_common.rpc.tcp import TcpMeter
from vfl_common.tensors import to_bundle
from vfl_party.context import rows_digest
from vfl_party.data import load_table

DTYPES = {np.dtype(np.float32): DType.FLOAT32, np.dtype(np.float16): DType.FLOAT16}


class HostilePassive:
    """Speaks through the real session and link, in the test's own process."""

    def __init__(self, federation: Federation, name: str) -> None:
        folder = federation.folder
        self.name, self._recipe = name, load_recipe(folder / "recipe.toml")
        self._credentials = load_credentials(
            TlsSettings(
                ca=str(folder / "certs/ca.pem"),
                certificate=str(folder / f"certs/{name}.pem"),
                key=str(folder / f"certs/{name}.key"),
            ),
            name=name,
        )
        self._data = DataSettings(**federation.data[name])
        self.ledger = Ledger()
        self.session = Session(
            federation.address, self._credentials, "server", self.ledger, TcpMeter(), heartbeat_s=0.5, wait_s=20.0
        )
        self.link: ExchangeLink | None = None

    def __enter__(self) -> HostilePassive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.link is not None:
            self.link.close()
        self.session.close()

    def join_and_open(self) -> None:
        """Joins, attaches to the active party, and shows the right rows."""
        joining = Joining("passive", self._recipe.canonical_json(), "train", os.getpid(), "cpu")
        start = self.session.join(joining)
        self.link = ExchangeLink(
            lambda: dial(start.exchange_address, self._credentials, "p0"),
            me=self.name,
            peer="p0",
            run_id=start.run_id,
            generation=start.generation,
            ledger=self.ledger,
            reconnect_s=10.0,
            timeout_s=30.0,
        )
        ids = load_table(self._data, with_label=False).ids
        digest = torch.frombuffer(bytearray(rows_digest(start.run_id, ids)), dtype=torch.uint8)
        rows = to_bundle(Kind.ROWS, {"count": torch.tensor([len(ids)]), "digest": digest})
        self.link.swap(StepKey("open", 0, 0), rows, BundleSpec(Kind.ACK))

    def bundle(self, z: npt.NDArray[Any]) -> Bundle:
        """An embedding bundle of any array."""
        return Bundle(Kind.EMBEDDING, {"z": Buffer(DTYPES[z.dtype], z.shape, memoryview(z.tobytes()))})

    def swap_expecting_failure(self, bundle: Bundle) -> VflError:
        """Sends the first step's embedding; the failure that comes back."""
        assert self.link is not None
        try:
            self.link.swap(StepKey("splitnn", 0, 0), bundle, BundleSpec(Kind.ACK))
        except VflError as error:
            return error
        raise AssertionError("the active party took it")
