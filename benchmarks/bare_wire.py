"""The bare loop's wire: raw bytes on one bidirectional gRPC stream a party, mutual TLS, nothing
checked or counted.

Method ``/bare/Exchange`` takes and returns bytes (identity serialisers). A tensor of known size
travels as one message, or as several of ``frame_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import torch
from torch import Tensor

SERVICE, METHOD = "bare", "Exchange"
PATH = f"/{SERVICE}/{METHOD}"
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass(frozen=True)
class Wire:
    """The bare loop's way to move bytes; the defaults are a plain honest loop that no variant beat
    by more than noise at both sizes (see ``benchmarks.bare_variants``).

    ``active``: ``queue`` (gRPC's threads hand to a plain loop in the main thread), ``inline`` (the
    handler thread that brings the last embedding computes) or ``aio`` (the same in an event loop).
    ``passive``: ``sync`` or ``aio`` streams, or one ``unary`` call a step. ``frame_bytes`` 0: one
    message a tensor. ``reply_first``: gradients leave before the top model's optimiser steps.
    """

    active: Literal["queue", "inline", "aio"] = "queue"
    passive: Literal["sync", "aio", "unary"] = "sync"
    frame_bytes: int = 0
    reply_first: bool = True
    tls: bool = True
    options: tuple[tuple[str, int | str], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def channel_options(self) -> list[tuple[str, int | str]]:
        """The gRPC options of both ends: no message limits, and this wire's own."""
        return [*_UNLIMITED, *self.options]

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Wire:
        """Make the wire from `to_json`'s fields."""
        return cls(
            **{**fields, "options": tuple((name, value) for name, value in fields["options"])}
        )


def to_frames(tensor: Tensor, frame_bytes: int) -> list[bytes]:
    """Return the tensor's bytes as messages of at most ``frame_bytes``; 0 means one message."""
    view = memoryview(tensor.detach().cpu().contiguous().numpy()).cast("B")
    if not frame_bytes or len(view) <= frame_bytes:
        return [view.tobytes()]
    return [view[at : at + frame_bytes].tobytes() for at in range(0, len(view), frame_bytes)]


def to_tensor(frames: Sequence[bytes], batch: int) -> Tensor:
    """Return the float32 tensor z_BE that the messages carry; one message is not copied."""
    data = frames[0] if len(frames) == 1 else b"".join(frames)
    return torch.frombuffer(data, dtype=torch.float32).view(batch, -1)


def server_credentials(certificates: Path) -> grpc.ServerCredentials:
    """Return the active party's side of mutual TLS."""
    ca, key, chain = _pems(certificates, "active")
    return grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=ca, require_client_auth=True
    )


def channel_credentials(certificates: Path, name: str) -> grpc.ChannelCredentials:
    """Return passive party ``name``'s side of mutual TLS."""
    ca, key, chain = _pems(certificates, name)
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=chain
    )


def _pems(certificates: Path, name: str) -> tuple[bytes, bytes, bytes]:
    return (
        (certificates / "ca.pem").read_bytes(),
        (certificates / f"{name}.key").read_bytes(),
        (certificates / f"{name}.pem").read_bytes(),
    )
