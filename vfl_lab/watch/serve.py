"""Serves the page on 127.0.0.1. Only this module imports FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from vfl_common.http_limits import Patient
from vfl_lab.watch.guard import TOKEN, Guard
from vfl_lab.watch.picture import Picture

LOOPBACK = "127.0.0.1"
# The interval between two readings of the files while a browser has the page open.
EVERY_S = 1.0
# The maximum number of simultaneous connections. A browser opens up to six.
MAX_CONNECTIONS = 200
# The interval of comments that keep proxies and browsers from closing a stream without events.
_BEAT_S = 15.0
# The maximum number of digits of a version in the id of an event.
_MAX_DIGITS = 18
# The time after which a browser reconnects to a stream that was interrupted.
_RETRY_MS = 2_000
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}


class Reader:
    """Reads the files of the run while there are viewers, and sends the changes to all of them."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        # A random id of this process. A page of an earlier process gets the whole state again.
        self.nonce = secrets.token_hex(4)
        self.viewers = 0
        self.ended = False
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        # These locks protect the picture, between coroutines and between threads.
        self._lock, self._thread_lock = asyncio.Lock(), threading.Lock()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[None]:
        """Counts a viewer for a block. The first viewer starts the readings, and the last ends
        them.
        """
        self.viewers += 1
        try:
            if self._task is None:
                news, self._task = self._news, asyncio.create_task(self._read_repeatedly())
                # The last reading for earlier viewers may be old, so this waits for a new one.
                await news.wait()
            yield
        finally:
            self.viewers -= 1
            if not self.viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _read_repeatedly(self) -> None:
        try:
            while True:
                await self._read()
                await asyncio.sleep(EVERY_S)
        # An unexpected error ends the program.
        except Exception as error:  # noqa: BLE001 - ``Page.serve`` raises it
            self.failure = error
            self.failed.set()

    async def _read(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._read_in_thread)
        self._notify_viewers()

    def _read_in_thread(self) -> None:
        with self._thread_lock:
            self._picture.read()

    def _get_changes(self, version: int) -> tuple[str, int]:
        with self._thread_lock:
            return self._picture.get_changes(version), self._picture.version

    def _notify_viewers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def end(self) -> None:
        """Reads the files a last time for the viewers, and ends their streams."""
        self.ended = True
        if self.viewers and self.failure is None:
            await self._read()
        self._notify_viewers()

    async def messages(self, last: str) -> AsyncIterator[str]:
        """Yields server-sent events for a viewer.

        ``last`` is the id of the last event that the viewer received.
        """
        nonce, _, number = last.partition("-")
        is_valid = nonce == self.nonce and number.isdecimal() and len(number) < _MAX_DIGITS
        version = int(number) if is_valid else 0
        yield f"retry: {_RETRY_MS}\n\n"
        async with self.viewing():
            while not self.ended or version < self._picture.version:
                news = self._news
                if version < self._picture.version:
                    async with self._lock:
                        text, version = self._get_changes(version)
                    # The compact JSON has no line breaks, which would end the event.
                    yield f"id: {self.nonce}-{version}\ndata: {text}\n\n"
                    continue
                try:
                    await asyncio.wait_for(news.wait(), _BEAT_S)
                except TimeoutError:
                    yield ": \n\n"
            yield "event: end\ndata: {}\n\n"


def make_application(reader: Reader) -> FastAPI:
    """Makes the FastAPI application, which serves the files of the page and a stream of events."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    folder = files("vfl_lab.watch")
    content = {name: (folder / name).read_bytes() for name in _FILES}

    @app.get("/")
    async def page() -> Response:
        return Response(content["page.html"], media_type=_FILES["page.html"])

    @app.get("/{name}.{kind}")
    async def page_file(name: str, kind: str) -> Response:
        body = content.get(f"{name}.{kind}")
        if body is None:
            return Response(status_code=404)
        return Response(body, media_type=_FILES[f"{name}.{kind}"])

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(reader.messages(last), media_type="text/event-stream")

    return app


class Page:
    """Serves the page of a run on a listening socket.

    ``link`` is the address of the page with the token.
    """

    def __init__(self, picture: Picture, listening: socket.socket) -> None:
        self._picture, self._socket = picture, listening
        self._token = secrets.token_urlsafe(24)
        self._port = listening.getsockname()[1]
        self.link = f"http://{LOOPBACK}:{self._port}/?{TOKEN}={self._token}"

    def serve(self, until: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Serves the page until a signal, which is then raised.

        ``until`` is called with a function that ends the page, and that any thread may call.
        """
        asyncio.run(self._serve(until))

    async def _serve(self, until: Callable[[Callable[[], None]], None] | None) -> None:
        reader = Reader(self._picture)
        config = uvicorn.Config(
            Guard(make_application(reader), self._token, self._port),
            http=Patient,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=3,
        )
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        server = _Server(config, ended)
        if until is not None:

            def end() -> None:
                loop.call_soon_threadsafe(ended.set)

            until(end)
        ending = asyncio.create_task(_wait_and_end(ended, reader, server))
        try:
            await server.serve(sockets=[self._socket])
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending
        if reader.failure is not None:
            raise reader.failure


class _Server(uvicorn.Server):
    """A uvicorn server that also ends the streams at a signal."""

    def __init__(self, config: uvicorn.Config, ended: asyncio.Event) -> None:
        super().__init__(config)
        self._ended = ended

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._ended.set()


async def _wait_and_end(ended: asyncio.Event, reader: Reader, server: uvicorn.Server) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in (ended, reader.failed)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    await reader.end()
    server.should_exit = True


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on the loopback interface. Raises OSError."""
    return socket.create_server((LOOPBACK, port), backlog=128)
