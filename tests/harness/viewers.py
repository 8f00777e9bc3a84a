"""Viewers of a page of ``vfl watch``, as a browser is one."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tests.harness.federation import BIN, Program

WAIT_S = 30.0
COOKIE = re.compile(r"(vfl-watch-\d+=[\w-]+)")


def ask(link: str, path: str = "/", **headers: str) -> tuple[int, dict[str, str], str]:
    """Asks for a path of the page's server; returns status, headers and body."""
    asking = http.client.HTTPConnection(urlsplit(link).netloc, timeout=WAIT_S)
    try:
        asking.request("GET", path, headers=headers)
        answer = asking.getresponse()
        found = {key.lower(): value for key, value in answer.getheaders()}
        return answer.status, found, answer.read().decode()
    finally:
        asking.close()


def entered(link: str) -> str:
    """Opens the link; returns the cookie."""
    parts = urlsplit(link)
    status, headers, _ = ask(link, f"/?{parts.query}")
    assert (status, headers["location"]) == (303, "/")
    found = COOKIE.match(headers["set-cookie"])
    assert found is not None
    return found[1]


class Viewer:
    """Takes a page's messages. ``curves``, ``log``: as the page's script joins them; ``state``:
    the last; ``ended``: the watch has said that it ends.
    """

    def __init__(self, link: str, last: str = "") -> None:
        self.state: dict[str, Any] = {}
        self.curves: dict[tuple[str, str, str, str], list[list[Any]]] = {}
        self.log: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.last, self.ended = last, False
        self._asking = http.client.HTTPConnection(urlsplit(link).netloc, timeout=WAIT_S)
        headers = {"Cookie": entered(link)} | ({"Last-Event-ID": last} if last else {})
        self._asking.request("GET", "/events", headers=headers)
        self._answer = self._asking.getresponse()
        assert self._answer.status == 200, self._answer.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._answer.close()
        self._asking.close()

    def take(self) -> bool:
        """Waits for the next message; False: the watch has ended."""
        while line := self._answer.readline().decode().rstrip("\n"):
            if line.startswith("event: end"):
                self.ended = True
            elif line.startswith("id: "):
                self.last = line.removeprefix("id: ")
            elif line.startswith("data: ") and not self.ended:
                self._join(json.loads(line.removeprefix("data: ")))
                return True
        return not self.ended and self.take()

    def until(self, holds: Callable[[Viewer], object]) -> Self:
        """Takes messages until ``holds``; fails if the watch ends before."""
        while not self.state or not holds(self):
            assert self.take(), self.state
        return self

    def _join(self, news: dict[str, Any]) -> None:
        self.messages.append(news)
        if news["anew"]:
            self.curves, self.log = {}, []
        for each in news.get("curves", ()):
            key = (each["party"], each["phase"], each["split"], each["metric"])
            before = [] if each["whole"] else self.curves.get(key, [])
            self.curves[key] = before + each["points"]
        self.log += news.get("log", ())
        self.state = news["state"]

    def status(self, name: str) -> str:
        found = [each for each in self.state.get("processes", ()) if each["name"] == name]
        return str(found[0]["status"]) if found else ""


def start_watch(path: Any, cwd: Any, *options: str) -> tuple[Program, str]:
    """Starts ``vfl watch``; returns the program and its link."""
    program = Program("watch", [str(BIN / "vfl"), "watch", str(path), *options], cwd, fresh=False)
    return program, program.wait_for("text")["text"].strip()
