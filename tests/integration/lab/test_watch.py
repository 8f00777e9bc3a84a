"""`vfl watch`: one reader of a run's files, any number of viewers, and nobody without the link."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest

from tests.harness import cases
from tests.harness.federation import BIN, Federation, Program, refused, toml
from tests.harness.proxy import Proxy
from tests.harness.viewers import Viewer, ask, entered, start_watch
from tests.harness.waiting import wait_until
from vfl_common import http_limits as patient
from vfl_common.files import part_names
from vfl_lab.watch import serve
from vfl_lab.watch.serve import Picture

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m" + "x" * 10_000


def metrics(round_: int, generation: int = 1, /, **values: float) -> str:
    line = {
        "time": f"2026-01-01T12:{generation:02d}:{round_:02d}.250Z",
        "generation": generation,
        "phase": "splitnn",
        "round": round_,
        "rounds": 9,
        "steps": 5 * round_,
        "seconds": 0.5,
        "metrics": {"validation": values} if values else {},
        "sent_bytes": 1000 * round_,
        "received_bytes": 500 * round_,
    }
    return json.dumps(line) + "\n"


def said(event: str, message: str = "", **facts: Any) -> str:
    line = {"time": "2026-01-01T12:00:00.000Z", "level": "info", "message": message or event}
    return json.dumps(line | {"event": event} | facts) + "\n"


def make(folder: Path, name: str = "bank", digest: str = "1", **facts: Any) -> Path:
    """The folder of one process of a run, with a recipe of two parties."""
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    recipe = {
        "name": "case",
        "server": "server",
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "phases": [{"name": "splitnn", "kind": "splitnn"}],
    }
    (own / "recipe.json").write_text(json.dumps(recipe))
    (own / "run.json").write_text(json.dumps({"run_id": "r", "recipe_digest": digest, **facts}))
    return own


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Counted(Picture):
    """Counts its readings."""

    readings = 0

    def read(self) -> None:
        self.readings += 1
        super().read()


@contextlib.contextmanager
def served(path: Path) -> Iterator[tuple[str, Counted]]:
    """Serves a page in this process, which reads every 50 ms; yields its link."""
    picture, ends = Counted(path), list[Callable[[], None]]()
    with serve.listen(0) as listening, patch.object(serve, "EVERY_S", 0.05):
        page = serve.Page(picture, listening)
        serving = threading.Thread(target=page.serve, args=[ends.append])
        serving.start()
        try:
            yield page.link, picture
        finally:
            wait_until(lambda: ends)[0]()
            serving.join(20)
            assert not serving.is_alive()


def test_a_page_has_all_then_only_what_is_new(tmp_path: Path) -> None:
    run = tmp_path / "20260101-120000-case-1f2e"
    bank = make(run)
    add(bank / "metrics.jsonl", metrics(1, auc=0.5) + metrics(2, auc=0.75))
    key = ("bank", "splitnn", "validation", "auc")
    # The newest run of a folder of runs.
    make(tmp_path / "20250101-120000-case-1f2e")
    with served(tmp_path) as (link, _), Viewer(link) as viewer:
        viewer.until(lambda seen: seen.curves)
        assert viewer.curves[key] == [[1, 0.5], [2, 0.75]]
        assert viewer.state["run"] == run.name
        assert viewer.state["phases"] == [{"name": "splitnn", "done": 2, "rounds": 9}]
        # A line comes in two parts.
        add(bank / "metrics.jsonl", metrics(3, auc=0.8)[:50])
        add(bank / "metrics.jsonl", metrics(3, auc=0.8)[50:])
        viewer.until(lambda seen: len(seen.curves[key]) == 3)
        added = [each["curves"] for each in viewer.messages if each.get("curves")][1:]
        assert [(each[0]["whole"], each[0]["points"]) for each in added] == [(False, [[3, 0.8]])]
        # A rollback: round 2 comes again.
        add(bank / "metrics.jsonl", metrics(2, 2, auc=0.9))
        viewer.until(lambda seen: seen.curves[key] == [[1, 0.5], [2, 0.9]])
        assert not any(each["anew"] for each in viewer.messages[1:])
        # A full file is renamed.
        (bank / "metrics.jsonl").rename(part_names(bank / "metrics.jsonl")[1])
        (bank / "metrics.jsonl").write_text(metrics(3, 2, auc=0.95))
        viewer.until(lambda seen: seen.curves[key] == [[1, 0.5], [2, 0.9], [3, 0.95]])
        # Who comes again has what it had.
        with Viewer(link, viewer.last) as again:
            add(bank / "metrics.jsonl", metrics(4, 2, auc=0.96))
            again.until(lambda seen: seen.state)
            assert not again.messages[0]["anew"]
            assert again.curves == {key: [[4, 0.96]]}
        # And who comes from another watch has nothing.
        with Viewer(link, "00000000-1000000") as stranger:
            stranger.until(lambda seen: seen.state)
            assert stranger.curves == {key: [*viewer.curves[key], [4, 0.96]]}


def test_a_run_may_vanish_come_back_and_be_another(tmp_path: Path) -> None:
    run = tmp_path / "run"
    add(make(run) / "metrics.jsonl", metrics(1, auc=0.5) + metrics(2, auc=0.75))
    key = ("bank", "splitnn", "validation", "auc")
    with served(run) as (link, _), Viewer(link) as viewer:
        viewer.until(lambda seen: seen.curves)
        shutil.rmtree(run)
        viewer.until(lambda seen: seen.state["state"] == "none")
        assert viewer.state["why"] == "the folder does not exist; this page waits for one"
        assert viewer.curves == {}
        add(make(run, digest="2") / "metrics.jsonl", metrics(1, auc=0.25))
        viewer.until(lambda seen: seen.curves)
        assert viewer.curves == {key: [[1, 0.25]]}
        # Another run in its place, between two readings.
        (run / "bank" / "metrics.jsonl").write_text("")
        make(run, digest="3")
        viewer.until(lambda seen: seen.curves == {})
        # The next run of a folder of runs.
        for file in ("run.json", "recipe.json"):
            (run / "bank" / file).unlink()
        viewer.until(lambda seen: seen.state["state"] == "none")
        make(run / "20260101-120000-case-1f2e")
        viewer.until(lambda seen: seen.state.get("run") == "20260101-120000-case-1f2e")
        make(run / "20260101-120001-case-1f2e")
        viewer.until(lambda seen: seen.state.get("run") == "20260101-120001-case-1f2e")


def test_damaged_files_and_hostile_names_change_no_page(tmp_path: Path) -> None:
    bank = make(tmp_path / "run")
    recipe = json.loads((bank / "recipe.json").read_text())
    recipe["parties"][1]["name"] = HOSTILE
    recipe["phases"][0]["name"] = HOSTILE
    (bank / "recipe.json").write_text(json.dumps(recipe))
    add(bank / "metrics.jsonl", metrics(1, **{HOSTILE: 0.5}) + "[1]\n{}\nnull\n\x00\n")
    lines = said("lost", party_=HOSTILE, how=HOSTILE) + said("failed", HOSTILE) + "{\n[]\n7\n"
    lines += said("waiting", missing=7) + said("waiting", missing=[["x"]]) + said("ready")
    add(bank / "log.jsonl", lines)
    (bank / "ledger.json").write_text('{"entries": [{"peer": 1}]}')
    with served(tmp_path / "run") as (link, _), Viewer(link) as viewer:
        viewer.until(lambda seen: seen.curves)
        texts = list(strings(viewer.messages[0]))
        assert max(map(len, texts)) <= 2_000
        assert all(text.isprintable() for text in texts)
        assert any(text.startswith("<img src=x") for text in texts)
        assert [each["level"] for each in viewer.log] == ["info"] * 5
        # What is damaged is only left out.
        add(bank / "metrics.jsonl", metrics(2, **{HOSTILE: 0.25}))
        viewer.until(lambda seen: [len(each) for each in seen.curves.values()] == [2])


def strings(value: Any) -> Iterator[str]:
    """All texts in a message, keys included."""
    if isinstance(value, str):
        yield value
    for each in value if isinstance(value, list) else ():
        yield from strings(each)
    for key, each in value.items() if isinstance(value, dict) else ():
        yield key
        yield from strings(each)


def test_nobody_comes_in_without_the_link_or_by_another_name(tmp_path: Path) -> None:
    make(tmp_path / "run")
    with served(tmp_path / "run") as (link, picture):
        parts = urlsplit(link)
        cookie = entered(link)
        assert ask(link)[0] == 403
        assert "vfl watch" in ask(link)[2]
        for wrong in ("", "x", parts.query.removeprefix("token=")[:-1], "%ff", "ä" * 5000):
            quoted = wrong.encode().hex() if "ä" in wrong else wrong
            assert ask(link, f"/?token={quoted}")[0] == 403
            name = cookie.partition("=")[0]
            assert ask(link, Cookie=f"{name}={quoted}")[0] == 403
        # The token is for the first page alone.
        assert ask(link, f"/events?{parts.query}")[0] == 403
        assert ask(link, "/page.js")[0] == 403
        for host in ("evil.example", f"evil.example:{parts.port}", "127.0.0.1.evil.example", ""):
            assert ask(link, f"/?{parts.query}", Host=host, Cookie=cookie)[0] in (400, 421)
        assert ask(link, Host=f"localhost:{parts.port}", Cookie=cookie)[0] == 200
        # Another port of this machine is another site, although it gets our cookie.
        assert ask(link, "/events", Cookie=cookie, **{"Sec-Fetch-Site": "same-site"})[0] == 403
        status, headers, page = ask(link, Cookie=cookie)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert headers["content-security-policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "http" not in page.replace("http-equiv", "")
        for name in ("page.js", "page.css"):
            status, headers, text = ask(link, f"/{name}", Cookie=cookie)
            assert status == 200
            assert "innerHTML" not in text
            assert "url(" not in text
        assert ask(link, "/page.py", Cookie=cookie)[0] == 404
        assert ask(link, "/../serve.py", Cookie=cookie)[0] == 404
        # None of them had anything read.
        assert picture.readings == 0


def test_the_files_are_read_once_for_all_and_only_while_somebody_looks(tmp_path: Path) -> None:
    bank = make(tmp_path / "run")
    with served(tmp_path / "run") as (link, picture):
        with contextlib.ExitStack() as stack:
            viewers = [stack.enter_context(Viewer(link)) for _ in range(10)]
            for viewer in viewers:
                viewer.until(lambda seen: seen.state)
            before, since = picture.readings, time.monotonic()
            add(bank / "metrics.jsonl", metrics(1, auc=0.5))
            for viewer in viewers:
                viewer.until(lambda seen: seen.curves)
            # One every 50 ms, and not one a viewer.
            assert picture.readings - before <= (time.monotonic() - since) / 0.05 + 2
        # A stream that is closed is noticed when something is sent.
        add(bank / "log.jsonl", said("note"))
        wait_until(lambda: picture.readings, lambda found: found == still(picture, found))
        count = picture.readings
        with Viewer(link) as viewer:
            viewer.until(lambda seen: seen.state)
        assert picture.readings > count


def ends_with(text: str, viewer: Viewer) -> bool:
    return bool(viewer.log) and viewer.log[-1]["text"] == text


def still(picture: Counted, count: int) -> int:
    """The readings after four intervals."""
    threading.Event().wait(0.2)
    return picture.readings if picture.readings != count else count


def test_viewers_that_take_nothing_or_ask_for_nothing_hold_up_nobody(tmp_path: Path) -> None:
    bank = make(tmp_path / "run")
    address = ("127.0.0.1", 0)
    with (
        patch.object(patient, "REQUEST_S", 0.3),
        patch.object(patient, "STALLED_S", 0.3),
        served(tmp_path / "run") as (link, _),
        contextlib.ExitStack() as stack,
    ):
        address = ("127.0.0.1", urlsplit(link).port or 0)
        halves = [stack.enter_context(socket.create_connection(address)) for _ in range(30)]
        for half in halves[::2]:
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0")
        cookie = entered(link)
        for _ in range(30):
            # They ask for events, and take none of them.
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(address)
            slow.sendall(
                f"GET /events HTTP/1.1\r\nHost: {link[7:22]}\r\nCookie: {cookie}\r\n\r\n".encode()
            )
        with Viewer(link) as viewer:
            for number in range(5):
                text = f"{number} " + "x" * 1_900
                add(bank / "log.jsonl", said("note", text) * 200)
                viewer.until(partial(ends_with, text))
        # Half a request is not waited for.
        for half in halves:
            half.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert half.recv(100) == b""


def test_a_defect_in_reading_ends_the_page_and_is_told(tmp_path: Path) -> None:
    class Defect(Picture):
        def read(self) -> None:
            raise ZeroDivisionError

    with serve.listen(0) as listening:
        page = serve.Page(Defect(tmp_path), listening)
        told = list[BaseException]()

        def run() -> None:
            try:
                page.serve()
            except ZeroDivisionError as error:
                told.append(error)

        serving = threading.Thread(target=run)
        serving.start()
        with Viewer(page.link) as viewer:
            while viewer.take():
                pass
        serving.join(20)
        assert len(told) == 1


def test_the_page_says_who_is_here_late_or_away(tmp_path: Path) -> None:
    # Twenty kilobytes an epoch.
    tables = cases.recipe(2, model={"embedding_size": 64}, phase={"epochs": 3})
    with Proxy() as proxy, Federation(tmp_path, tables, cases.digits(2)) as federation:
        federation.extra = {"p1": {"active": proxy.address}}
        proxy.hold_at(sent=34_000)
        server = federation.start_server()
        watch, link = start_watch(tmp_path / "runs", tmp_path)
        federation.programs["watch"] = watch
        with Viewer(link) as viewer:
            active = federation.start_party("p0")
            proxy.target = active.wait_for("ready")["address"]
            viewer.until(lambda seen: (seen.status("p0"), seen.status("p1")) == ("here", "awaited"))
            assert viewer.state["state"] == "waiting"
            federation.start_party("p1")
            viewer.until(lambda seen: seen.state["state"] == "running")
            assert {viewer.status(name) for name in ("server", "p0", "p1")} == {"here"}
            proxy.wait_until_held()
            federation.programs["p1"].kill()
            server.wait_for("interrupted")
            viewer.until(lambda seen: seen.state["state"] == "waiting")
            viewer.until(lambda seen: seen.status("p1") in ("lost", "awaited"))
            # It comes back, and the page goes on.
            proxy.release()
            federation.start_party("p1")
            # The run is finished when the server says so, and each party when its own log says so.
            viewer.until(
                lambda seen: {seen.status(name) for name in ("server", "p0", "p1")} == {"finished"}
            )
            assert viewer.state["state"] == "finished"
            # The page has the rounds that count, each once.
            key = ("p0", "splitnn", "validation", "accuracy")
            assert [each[0] for each in viewer.curves[key]] == [1, 2, 3]
            links = {(each["from"], each["to"]): each["bytes"] for each in viewer.state["links"]}
            assert links["p1", "p0"] > links["p1", "server"] > 0
            watch.signal(signal.SIGINT)
            while viewer.take():
                pass
            assert viewer.ended
        assert watch.wait() == 130
        assert watch.stderr == "stopped: the run goes on\n"
        del federation.programs["watch"]
        federation.finish()
        watch.close()


def test_a_simulation_shows_itself_to_its_end(tmp_path: Path) -> None:
    recipe = cases.recipe(2) | {
        "simulate": {
            "scheme": "halves",
            "data": {"source": "sklearn:digits", "label": "target", "limit": 100},
        }
    }
    (tmp_path / "case.toml").write_text(toml(recipe))
    args = [str(BIN / "vfl"), "simulate", "case.toml", "--watch"]
    program = Program("simulate", args, tmp_path, fresh=False)
    try:
        words = wait_until(
            lambda: program.stderr.split(), lambda found: "run:" in found[:3] and len(found) > 3
        )
        link = words[3]
        with Viewer(link) as viewer:
            while viewer.take():
                pass
            assert viewer.ended
        assert program.wait() == 0
    finally:
        program.close()
    (run,) = (tmp_path / "runs").glob("[!.]*")
    lines = [json.loads(line) for line in (run / "p0" / "metrics.jsonl").read_text().splitlines()]
    losses = [
        [each["round"], each["metrics"]["train"]["loss"]]
        for each in lines
        if "train" in each["metrics"]
    ]
    assert viewer.state["run"] == run.name
    assert viewer.curves["p0", "splitnn", "train", "loss"] == losses
    assert viewer.state["state"] == "finished"
    # Nothing listens any more.
    with pytest.raises(ConnectionRefusedError):
        ask(link)


def test_a_party_shows_the_runs_of_its_own_folder(tmp_path: Path) -> None:
    with Federation(tmp_path, cases.recipe(2), cases.digits(2)) as federation:
        federation.start_server()
        active = federation.start_party("p0", "--watch")
        words = wait_until(lambda: active.stderr.split(), lambda found: len(found) > 3)
        with Viewer(words[3]) as viewer:
            federation.start_party("p1")
            while viewer.take():
                pass
        assert viewer.status("p0") in ("here", "finished")
        assert viewer.curves["p0", "splitnn", "train", "loss"]
        federation.finish()


def test_what_cannot_be_shown_is_one_sentence(tmp_path: Path) -> None:
    def start(*args: str) -> Program:
        return Program("watch", [str(BIN / "vfl"), "watch", *args], tmp_path, fresh=False)

    program = start("none")
    refused(program, "none: no such folder")
    program.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        program = start(".", "--port", str(taken.getsockname()[1]))
        refused(program, "--port", "Choose another port")
        program.close()
