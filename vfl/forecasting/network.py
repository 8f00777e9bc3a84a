"""Reads bandwidth and latency as people write them, and times a forecast's exchanges with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vfl_common.errors import Code, InputError
from vfl_common.psi import MASKED_IDS
from vfl_party.forecast.result import StepRun

# Measured on Linux with grpcio 1.85 and TLS 1.3, on the TCP streams of runs with messages of 8 to
# 550 kB: frames of HTTP/2, records of TLS, and the other direction's window updates. Headers of TCP
# and IP are not among them.
AROUND_MESSAGE_BYTES = 60
AROUND_BYTES_SHARE = 0.0018

_BANDWIDTH = re.compile(
    r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(bit|bits|b|bp|byte|bytes)(?:/s|s|ps)?", re.IGNORECASE
)
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)", re.IGNORECASE)
_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class BatchWork:
    """What a batch computes. ``loop_s``: one after the other, until its answer is used;
    ``slowest_s``: at one party.

    With several steps in flight the parties compute at the same time, so the slowest sets the pace;
    if they share a machine, also ``total_s``: the processor time of all parties; 0: unknown.
    """

    loop_s: float = 0.0
    slowest_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """All links are alike. ``bandwidth``: bits a second, in each direction; ``latency_s``: one way.

    ``work``: {phase: what a step that trains computes}; ``any_work``: that of every other phase.
    ``masking_s``: what the masking of a private alignment takes a party a step, while the step
    before travels.
    ``cores``: of the machine on which all parties are; None: each has a machine of its own.
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
        """Reads texts such as ``100Mbit/s``, ``20ms`` and ``1.5ms``. Raises InputError."""
        step_s = read_time(step_time, "--step-time")
        return cls(
            read_bandwidth(bandwidth),
            read_time(latency, "--latency"),
            any_work=BatchWork(step_s, step_s),
            cores=cores,
        )

    def over_s(self, message_bytes: int, messages: int) -> float:
        """Returns how long messages take through the narrowest point, with what gRPC and TLS put
        around them.

        That is the link of the answering party, because all parties share it: all that they send
        comes in over it, and the answers go out over it. Its two directions do not disturb each
        other.
        """
        return (
            (message_bytes * (1 + AROUND_BYTES_SHARE) + messages * AROUND_MESSAGE_BYTES)
            * 8
            / self.bandwidth
        )

    def seconds(self, phase: str, runs: Iterable[StepRun]) -> float:
        """Times the steps of a phase."""
        return sum(run.times * self.run_s(phase, run) for run in runs)

    def run_s(self, phase: str, run: StepRun) -> float:
        """Times the steps of one round, from the first message to the use of the last answer.

        One step alone takes ``loop``: the latency of both ways, the bytes of all parties up, and
        down, and what it computes. With D in flight, D steps share that time; but none is sooner
        than the bytes of one direction, the slowest party, or the cores that all share, allow:
        ``least``. The first step of the round takes ``loop``; then each block of D steps takes the
        longer of ``loop`` and D times ``least``. If a batch is exchanged in parts, the same holds
        of whole batches: its ``loop`` ends with the answer of its last part.
        """
        up_s = self.over_s(run.up_bytes, run.up_messages) / run.steps
        down_s = self.over_s(run.down_bytes, run.down_messages) / run.steps
        work = self.work.get(phase, self.any_work) if run.trains else BatchWork()
        if run.exchange == MASKED_IDS:
            work = BatchWork(slowest_s=self.masking_s)
        loop_s = 2 * self.latency_s + up_s + down_s + work.loop_s / run.parts
        shared_s = work.total_s / self.cores if self.cores is not None else 0.0
        least_s = max(up_s, down_s, max(work.slowest_s, shared_s) / run.parts)
        loop_s = max(loop_s, least_s)
        loop_s, least_s = loop_s + (run.parts - 1) * least_s, run.parts * least_s
        batches, in_flight = -(-run.steps // run.parts), max(1, run.in_flight // run.parts)
        blocks, rest = divmod(batches - 1, in_flight)
        return loop_s + blocks * max(loop_s, in_flight * least_s) + rest * least_s


def read_bandwidth(text: str) -> float:
    """Reads bits a second: ``10Mbit``, ``1Gbit/s``, ``100 Mbps``, ``12.5MB/s``; B is bytes. Raises
    InputError.
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0
    if found is not None:
        unit = found[3]
        is_bytes = unit.lower().startswith("byte") or (
            unit[0] == "B" and not unit.lower().startswith("bit")
        )
        value = float(found[1]) * _FACTOR[found[2].lower()] * (8 if is_bytes else 1)
    if not 0 < value < math.inf:
        text = (
            f"--bandwidth {text}: give a number above 0 with a unit, as in 10Mbit/s, 1Gbit, 100MB/s"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    return value


def read_latency(text: str) -> float:
    """Reads the latency of a link, one way; see ``read_time``."""
    return read_time(text, "--latency")


def read_time(text: str, option: str) -> float:
    """Reads seconds: ``20ms``, ``0.1s``, ``500us``, ``0``. Raises InputError, which names
    ``option``.
    """
    found = _LATENCY.fullmatch(text.strip())
    value = (
        float(found[1]) * _SECONDS[found[2].lower()]
        if found is not None
        else 0.0
        if text.strip() == "0"
        else None
    )
    if value is None or value > _LONGEST_S:
        text = f"{option} {text}: give a number with a unit, as in 20ms or 0.1s, at most an hour"
        raise InputError(Code.CONFIG_INVALID, text)
    return value
