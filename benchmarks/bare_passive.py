"""The bare loop's passive process: ``python -m benchmarks.bare_passive SPEC.json PARTY PORT``."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
from torch import Tensor

from benchmarks.bare_wire import PATH, Wire, channel_credentials, to_frames, to_tensor
from benchmarks.task import Task, batches, begin, bottom_of, features_of, sgd


class BottomLoop:
    """A passive party's half of a step: forward, then, with the gradient, backward and update."""

    def __init__(self, task: Task, wire: Wire, party: int) -> None:
        self._task, self._wire = task, wire
        self._x = features_of(task, party)
        self._bottom = bottom_of(task, party)
        self._optimizer = sgd(self._bottom)
        self._z_BE: Tensor | None = None
        self.frames_a_tensor = -(
            -task.embedding_bytes // (wire.frame_bytes or task.embedding_bytes)
        )

    def embed(self, i_B: Tensor) -> list[bytes]:
        """Return the messages that carry z_BE of rows ``i_B``."""
        self._z_BE = self._bottom(self._x[i_B])
        return to_frames(self._z_BE, self._wire.frame_bytes)

    def learn(self, frames: list[bytes]) -> None:
        """Go back from the gradient dz_BE and update."""
        assert self._z_BE is not None
        self._optimizer.zero_grad()
        dz_BE = to_tensor(frames, self._task.batch).to(self._task.device)
        self._z_BE.backward(dz_BE)
        self._optimizer.step()


def run_sync(loop: BottomLoop, task: Task, channel: grpc.Channel, party: int) -> None:
    """Train over one blocking stream."""
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    replies: Iterator[bytes] = channel.stream_stream(PATH)(
        iter(outbox.get, None), metadata=_metadata(party)
    )
    for i_B in batches(task):
        for frame in loop.embed(i_B):
            outbox.put(frame)
        loop.learn([next(replies) for _ in range(loop.frames_a_tensor)])
    outbox.put(None)
    # A stream that closes before the active ends it would cancel its handler in the last step.
    for _ in replies:
        pass


def run_unary(loop: BottomLoop, task: Task, channel: grpc.Channel, party: int) -> None:
    """Train with one blocking call a step, one message each way."""
    call = channel.unary_unary(PATH)
    for i_B in batches(task):
        loop.learn([call(loop.embed(i_B)[0], metadata=_metadata(party))])


async def run_aio(loop: BottomLoop, task: Task, channel: Any, party: int) -> None:
    """Train over one stream of an event loop that also computes."""
    call = channel.stream_stream(PATH)(metadata=_metadata(party))
    for i_B in batches(task):
        for frame in loop.embed(i_B):
            await call.write(frame)
        loop.learn([await call.read() for _ in range(loop.frames_a_tensor)])
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


def _metadata(party: int) -> tuple[tuple[str, str], ...]:
    return (("party", str(party)),)


def _channel(module: Any, wire: Wire, certificates: Path, party: int, port: int) -> Any:
    """Open a channel of ``module``, which is ``grpc`` or ``grpc.aio``."""
    target = f"127.0.0.1:{port}"
    if not wire.tls:
        return module.insecure_channel(target, options=wire.channel_options)
    credentials = channel_credentials(certificates, f"passive{party}")
    return module.secure_channel(target, credentials, options=wire.channel_options)


def main() -> None:
    """Run the passive party that the specification file and the command line describe."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    spec, party, port = (
        json.loads(Path(sys.argv[1]).read_text()),
        int(sys.argv[2]),
        int(sys.argv[3]),
    )
    task, wire, certificates = (
        Task.from_json(spec["task"]),
        Wire.from_json(spec["wire"]),
        Path(spec["certificates"]),
    )
    begin(task, task.passive_threads)
    loop = BottomLoop(task, wire, party)
    if wire.passive == "aio":

        async def train() -> None:
            async with _channel(grpc.aio, wire, certificates, party, port) as channel:
                await run_aio(loop, task, channel, party)

        asyncio.run(train())
        return
    with _channel(grpc, wire, certificates, party, port) as channel:
        if wire.passive == "unary":
            run_unary(loop, task, channel, party)
        else:
            run_sync(loop, task, channel, party)


if __name__ == "__main__":
    main()
