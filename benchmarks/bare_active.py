"""The bare loop's active process: ``python -m benchmarks.bare_active SPEC.json``."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
import torch
from torch import Tensor, nn

from benchmarks.bare_wire import METHOD, SERVICE, Wire, server_credentials, to_frames, to_tensor
from benchmarks.processes import announce
from benchmarks.stopwatch import Stopwatch
from benchmarks.task import Task, batches, begin, labels_of, sgd, top_of

Frames = list[bytes]


class TopLoop:
    """The active party's half of a step, and the clock of the run. Called once a step, by one
    thread at a time.
    """

    def __init__(self, task: Task, wire: Wire) -> None:
        self._task, self._wire = task, wire
        self._y_N1, self._top = labels_of(task), top_of(task)
        self._optimizer, self._criterion = sgd(self._top), nn.BCEWithLogitsLoss()
        self._rows, self._step = batches(task), 0
        self._watch = Stopwatch(task)
        self._loss: Tensor = torch.zeros(())
        self.frames_a_tensor = -(
            -task.embedding_bytes // (wire.frame_bytes or task.embedding_bytes)
        )

    def gradients(self, arrived: dict[int, Frames]) -> dict[int, Frames]:
        """Return each party's gradient dz_BE for the embeddings that arrived; call `update`
        afterwards.
        """
        self._watch.lap()
        self._step += 1
        leaves = {
            k: to_tensor(frames, self._task.batch).to(self._task.device).requires_grad_()
            for k, frames in arrived.items()
        }
        self._optimizer.zero_grad()
        z_BE = sum(leaves[k] for k in sorted(leaves))
        self._loss = self._criterion(self._top(z_BE), self._y_N1[next(self._rows)])
        self._loss.backward()
        if not self._wire.reply_first:
            self._optimizer.step()
        replies = {}
        for k, leaf in leaves.items():
            assert leaf.grad is not None
            replies[k] = to_frames(leaf.grad, self._wire.frame_bytes)
        return replies

    def update(self) -> None:
        """Step the top model's optimiser, after the replies left if the wire says so."""
        if self._wire.reply_first:
            self._optimizer.step()

    @property
    def finished(self) -> bool:
        """True once every step of the task is done."""
        return self._step == self._task.warmup + self._task.steps

    def report(self) -> None:
        """Announce the stopwatch's fields and the last loss."""
        announce("done", **self._watch.stop(), loss=self._loss.item())


def party_of(context: Any) -> int:
    """Return the number that a passive party sent as metadata."""
    return int(dict(context.invocation_metadata())["party"])


class SyncHandlers:
    """gRPC threads move bytes; the main thread, or the thread that brings the last embedding,
    computes.
    """

    def __init__(self, task: Task, wire: Wire, loop: TopLoop) -> None:
        self._task, self._loop = task, loop
        self._inline = wire.active == "inline"
        self.inbox: SimpleQueue[tuple[int, Frames]] = SimpleQueue()
        self.outboxes: list[SimpleQueue[Frames]] = [SimpleQueue() for _ in range(task.parties)]
        self.finished: SimpleQueue[None] = SimpleQueue()
        self._arrived: dict[int, Frames] = {}
        self._lock = threading.Lock()

    def stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handle a party's stream: all steps."""
        k, frames = party_of(context), []
        for frame in requests:
            frames.append(frame)
            if len(frames) == self._loop.frames_a_tensor:
                arrived, frames = frames, []
                if self._inline:
                    yield from self._arrive(k, arrived)
                else:
                    self.inbox.put((k, arrived))
                    yield from self.outboxes[k].get()

    def unary(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Handle one step of a party that calls once a step."""
        k = party_of(context)
        self.inbox.put((k, [request]))
        return self.outboxes[k].get()[0]

    def _arrive(self, k: int, frames: Frames) -> Iterator[bytes]:
        with self._lock:
            self._arrived[k] = frames
            arrived = self._arrived
            last = len(arrived) == self._task.parties
            if last:
                self._arrived = {}
        if not last:
            yield from self.outboxes[k].get()
            return
        replies = self._loop.gradients(arrived)
        for other, reply in replies.items():
            if other != k:
                self.outboxes[other].put(reply)
        self._loop.update()
        if self._loop.finished:
            self.finished.put(None)
        yield from replies[k]

    def train(self) -> None:
        """Return when every step is done; the main thread's loop of the ``queue`` variant."""
        if self._inline:
            self.finished.get()
            return
        while not self._loop.finished:
            arrived: dict[int, Frames] = {}
            while len(arrived) < self._task.parties:
                k, frames = self.inbox.get()
                arrived[k] = frames
            for k, reply in self._loop.gradients(arrived).items():
                self.outboxes[k].put(reply)
            self._loop.update()


def handlers(wire: Wire, stream: Any, unary: Any) -> grpc.GenericRpcHandler:
    """Return the generic handler of the one method, with identity serialisers."""
    if wire.passive == "unary":
        method = grpc.unary_unary_rpc_method_handler(unary)
    else:
        method = grpc.stream_stream_rpc_method_handler(stream)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})


def run_sync(task: Task, wire: Wire, certificates: Path) -> None:
    """Serve with gRPC's thread pool until the task is done."""
    loop = TopLoop(task, wire)
    service = SyncHandlers(task, wire, loop)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=task.parties + 1), options=wire.channel_options
    )
    server.add_generic_rpc_handlers((handlers(wire, service.stream, service.unary),))
    announce("ready", port=_listen(server, wire, certificates))
    server.start()
    service.train()
    loop.report()
    server.stop(grace=5).wait()


async def run_aio(task: Task, wire: Wire, certificates: Path) -> None:
    """Serve with one event loop that also computes: no thread waits for another."""
    loop, arrived = TopLoop(task, wire), {}
    contexts: dict[int, Any] = {}
    done = asyncio.Event()

    async def stream(_: Any, context: Any) -> None:
        k = party_of(context)
        contexts[k] = context
        while not loop.finished:
            frames = [await context.read() for _ in range(loop.frames_a_tensor)]
            if frames[0] is grpc.aio.EOF:
                return
            arrived[k] = frames
            if len(arrived) < task.parties:
                # The party that brings the last embedding computes and replies for all.
                continue
            replies = loop.gradients(arrived)
            arrived.clear()
            for frames_k in zip(*replies.values(), strict=True):
                await asyncio.gather(
                    *(contexts[j].write(f) for j, f in zip(replies, frames_k, strict=True))
                )
            loop.update()
        done.set()

    server = grpc.aio.server(options=wire.channel_options)
    server.add_generic_rpc_handlers((handlers(wire, stream, None),))
    port = _listen(server, wire, certificates)
    await server.start()
    announce("ready", port=port)
    await done.wait()
    loop.report()
    await server.stop(grace=5)


def _listen(server: Any, wire: Wire, certificates: Path) -> int:
    if wire.tls:
        return int(server.add_secure_port("127.0.0.1:0", server_credentials(certificates)))
    return int(server.add_insecure_port("127.0.0.1:0"))


def main() -> None:
    """Run the active party that the specification file describes."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    spec = json.loads(Path(sys.argv[1]).read_text())
    task, wire = Task.from_json(spec["task"]), Wire.from_json(spec["wire"])
    certificates = Path(spec["certificates"])
    begin(task, 1)
    if wire.active == "aio":
        asyncio.run(run_aio(task, wire, certificates))
    else:
        run_sync(task, wire, certificates)


if __name__ == "__main__":
    main()
