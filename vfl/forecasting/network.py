"""Parses and formats bandwidth and latency, and computes the time of a forecast's exchanges."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vfl_common.errors import Code, InputError
from vfl_common.psi import MASKED_IDS
from vfl_party.forecast.result import StepRun

# The overhead of a message: bytes per message, and a share of its size. It was measured on Linux
# with grpcio 1.85, TLS 1.3 and messages of 8 to 550 kB. It includes HTTP/2 frames, TLS records and
# window updates of the other direction, but no TCP and IP headers.
AROUND_MESSAGE_BYTES = 60
AROUND_BYTES_SHARE = 0.0018

_BANDWIDTH = re.compile(
    r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(bit|bits|b|bp|byte|bytes)(?:/s|s|ps)?", re.IGNORECASE
)
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)", re.IGNORECASE)
_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_MAX_S = 3600.0


@dataclass(frozen=True)
class BatchWork:
    """The computing time of a batch.

    ``loop_s``: the time of all computations in sequence, until the answer is used. ``slowest_s``:
    the time of the slowest party, which is the limit with several steps in flight, because parties
    then compute at the same time. ``total_s``: the processor time of all parties, which is the
    limit if they share a machine; 0: unknown.
    """

    loop_s: float = 0.0
    slowest_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """The links between parties, which are all equal, and the parties' computing times.

    ``bandwidth``: bits per second in each direction. ``latency_s``: the one-way latency.
    ``work``: {phase: computing time of a training step}. ``any_work``: the computing time of a
    training step in all other phases. ``masking_s``: the time in which a party masks the ids of one
    step of private alignment, while the message of the step before is on the network. ``cores``:
    the number of cores of the machine that all parties share; None if each party has its own
    machine.
    """

    bandwidth: float
    latency_s: float
    work: Mapping[str, BatchWork] = field(default_factory=dict)
    any_work: BatchWork = field(default_factory=BatchWork)
    masking_s: float = 0.0
    cores: int | None = None

    @classmethod
    def read(
        cls, bandwidth: str, latency: str, step_time: str = "0", cores: int | None = None
    ) -> Network:
        """Parses texts such as ``100Mbit/s``, ``20ms`` and ``1.5ms``. Raises InputError."""
        step_s = read_time(step_time, "--step-time")
        return cls(
            read_bandwidth(bandwidth),
            read_time(latency, "--latency"),
            any_work=BatchWork(step_s, step_s),
            cores=cores,
        )

    def over_s(self, message_bytes: int, messages: int) -> float:
        """Returns the seconds that messages take on the bottleneck link, with the overhead of gRPC
        and TLS.

        The bottleneck is the link of the answering party. The messages of all other parties come in
        over this link, and the answers go out over it. The two directions are independent.
        """
        return (
            (message_bytes * (1 + AROUND_BYTES_SHARE) + messages * AROUND_MESSAGE_BYTES)
            * 8
            / self.bandwidth
        )

    def seconds(self, phase: str, runs: Iterable[StepRun]) -> float:
        """Returns the time of all steps of a phase."""
        return sum(run.times * self.run_s(phase, run) for run in runs)

    def run_s(self, phase: str, run: StepRun) -> float:
        """Returns the time of the steps of one round, from the first message to the use of the last
        answer.

        One step alone takes ``loop_s``: the latency of both directions, the transfer of all
        parties' bytes in both directions, and the computing time. With D steps in flight, D steps
        share this time. But a step takes at least ``min_s``: the maximum of the transfer in one
        direction, the computation of the slowest party, and the computation on shared cores. The
        first step of the round takes ``loop_s``. Then each block of D steps takes the maximum of
        ``loop_s`` and D times ``min_s``. If a batch is exchanged in parts, the rule applies to
        whole batches, and ``loop_s`` ends with the answer of the last part.
        """
        up_s = self.over_s(run.up_bytes, run.up_messages) / run.steps
        down_s = self.over_s(run.down_bytes, run.down_messages) / run.steps
        work = self.work.get(phase, self.any_work) if run.trains else BatchWork()
        if run.exchange == MASKED_IDS:
            work = BatchWork(slowest_s=self.masking_s)
        loop_s = 2 * self.latency_s + up_s + down_s + work.loop_s / run.parts
        shared_s = work.total_s / self.cores if self.cores is not None else 0.0
        min_s = max(up_s, down_s, max(work.slowest_s, shared_s) / run.parts)
        loop_s = max(loop_s, min_s)
        loop_s, min_s = loop_s + (run.parts - 1) * min_s, run.parts * min_s
        batches, in_flight = -(-run.steps // run.parts), max(1, run.in_flight // run.parts)
        blocks, rest = divmod(batches - 1, in_flight)
        return loop_s + blocks * max(loop_s, in_flight * min_s) + rest * min_s


def read_bandwidth(text: str) -> float:
    """Parses a bandwidth to bits per second: ``10Mbit``, ``1Gbit/s``, ``100 Mbps``, ``12.5MB/s``. A
    capital B means bytes. Raises InputError.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0
    if match is not None:
        unit = match[3]
        is_bytes = unit.lower().startswith("byte") or (
            unit[0] == "B" and not unit.lower().startswith("bit")
        )
        value = float(match[1]) * _FACTOR[match[2].lower()] * (8 if is_bytes else 1)
    if not 0 < value < math.inf:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--bandwidth {text}: must be greater than 0 and have a unit. Give a bandwidth such as "
            "10Mbit/s, 1Gbit or 100MB/s.",
        )
    return value


def read_latency(text: str) -> float:
    """Parses the one-way latency of a link to seconds; see ``read_time``."""
    return read_time(text, "--latency")


def read_time(text: str, option: str) -> float:
    """Parses a time to seconds: ``20ms``, ``0.1s``, ``500us``, ``0``. ``option``: the option's name
    for the InputError that it raises.
    """
    match = _LATENCY.fullmatch(text.strip())
    value = (
        float(match[1]) * _SECONDS[match[2].lower()]
        if match is not None
        else 0.0
        if text.strip() == "0"
        else None
    )
    if value is None or value > _MAX_S:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{option} {text}: must be at most an hour and have a unit. Give a time such as 20ms "
            "or 0.1s.",
        )
    return value


def format_rate(bits: float) -> str:
    """Formats a bit rate, such as ``100 Mbit/s``."""
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"


def format_duration(time_s: float) -> str:
    """Formats a time in seconds: ``0.35 s``, ``421 s``, ``12 min``, ``3.5 h``."""
    if time_s < 600:
        return f"{time_s:.2g} s" if time_s < 10 else f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 6000 else f"{time_s / 3600:.1f} h"


def format_number(value: float) -> str:
    """Formats a large number: ``812``, ``1.24 M``, ``5.6 G``."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"
