"""The console of a node: what people see, and what others cannot do."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.harness.standing import Standing, make_recipe

NASTY = '"><script>alert(1)</script>{{ 7 * 7 }}'


class Browser:
    """Keeps a cookie and follows no redirect."""

    def __init__(self, url: str) -> None:
        self._host, self.cookie = url.partition("://")[2].partition("/")[0], ""

    def ask(
        self, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        given = {"Cookie": self.cookie, **headers}
        if form is None:
            connection.request("GET", path, headers=given)
        else:
            given["Content-Type"] = "application/x-www-form-urlencoded"
            connection.request("POST", path, urlencode(form), given)
        answer = connection.getresponse()
        text, facts = answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}
        connection.close()
        self.cookie = facts.get("set-cookie", self.cookie).partition(";")[0]
        return answer.status, text, facts


@pytest.fixture
def console(tmp_path: Path) -> Iterator[tuple[Standing, Browser]]:
    federation = Standing(tmp_path)
    federation.write_node("shop", approval="each")
    federation.start_hub()
    federation.start_node("bank")
    node = federation.run("shop", "vfl-party", "node", "shop/node.toml", "--console")
    federation.nodes["shop"] = node
    browser = Browser(node.wait_for("ready")["console"])
    for program in federation.nodes.values():
        program.wait_for("connected")
    yield federation, browser
    federation.close()


def sign_in(federation: Standing, browser: Browser) -> None:
    token = (federation.folder / "shop" / "node" / "api.token").read_text()
    status, _, facts = browser.ask("/console/login", {"token": token})
    assert status == 303
    assert "HttpOnly" in facts["set-cookie"]
    assert "SameSite=strict" in facts["set-cookie"]


def test_a_person_checks_and_approves_a_proposal(console: tuple[Standing, Browser]) -> None:
    federation, browser = console
    sign_in(federation, browser)
    assert "There are no proposals" in browser.ask("/console")[1]
    asked = {"recipe": make_recipe(epochs=1), "data": {"bank": "main", "shop": "main"}}
    number = federation.ask("bank", "/v1/proposals", {**asked, "purpose": NASTY})["id"]
    federation.wait(number, lambda row: "bank" in row["votes"], at="shop")
    status, page, facts = browser.ask("/console")
    assert status == 200
    assert "waits for you" in page
    assert "<script" not in page
    assert "{{ 7 * 7 }}" in page
    assert facts["content-security-policy"].startswith("default-src 'none'")
    # With no-referrer, browsers send the origin null with forms, which are then refused.
    assert facts["referrer-policy"] == "same-origin"
    path = f"/console/proposals/{number}"
    checked = browser.ask(f"{path}?check=1")[1]
    assert "leaves" in checked
    assert "embedding" in checked
    csrf = re.findall(r'name="csrf" value="(\w+)"', checked)[0]
    assert browser.ask(path, {"csrf": csrf, "action": "approve"})[0] == 303
    assert federation.wait_for_state(number, "done", at="shop")["votes"]["shop"] == ["approve"]
    assert ">done<" in browser.ask(path)[1]


def test_others_can_do_nothing(console: tuple[Standing, Browser]) -> None:
    federation, browser = console
    number = federation.submit(make_recipe())
    federation.wait(number, lambda row: "bank" in row["votes"], at="shop")
    path = f"/console/proposals/{number}"
    for page in ("/console", path):
        status, _, facts = browser.ask(page)
        assert (status, facts["location"]) == (303, "/console/login")
    assert browser.ask(path, {"action": "approve"})[0] == 303
    for wrong in ("/v1/status", "/v1/proposals"):
        assert browser.ask(wrong)[0] == 401
    sign_in(federation, browser)
    # Another site has the cookie if the browser is old, but neither the token nor the origin.
    assert browser.ask(path, {"action": "approve"})[0] == 403
    csrf = re.findall(r'name="csrf" value="(\w+)"', browser.ask(path)[1])[0]
    form = {"action": "approve", "csrf": csrf}
    assert browser.ask(path, form, Origin="https://evil.example.org")[0] == 403
    assert browser.ask(path, {**form, "action": "x"})[0] == 400
    assert browser.ask(path, {"why": "a" * 10_000})[0] == 413
    assert federation.row(number, at="shop")["votes"].get("shop") is None
    # The cookie does not open the API.
    assert browser.ask("/v1/status")[0] == 401
    stranger = Browser("http://" + browser._host)
    answers = [stranger.ask("/console/login", {"token": f"guess {n}"})[0] for n in range(12)]
    assert answers == [403] * 10 + [429] * 2
