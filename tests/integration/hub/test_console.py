"""The console of a node: what people see, and what others cannot do."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import HTTPException, Request

from tests.harness.errors import raises
from tests.harness.standing import Standing, make_recipe
from tests.harness.waiting import wait_until
from vfl_common.errors import Code, InputError
from vfl_hub.console import Sessions
from vfl_hub.settings import ConsoleSettings

SECRET = "x" * 40
PEOPLE = {"ann@example.org": "owner", "bob@example.org": "approver", "vic@example.org": "viewer"}
LOSS = ("splitnn", "train", "loss")
NASTY = '"><script>alert(1)</script>{{ 7 * 7 }}'


class Browser:
    """Keeps a cookie and follows no redirect."""

    def __init__(self, url: str) -> None:
        self.url, self.cookie = url, ""
        self._host = url.partition("://")[2].partition("/")[0]

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
    secret = tmp_path / "proxy.secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    people = {"roles": PEOPLE, "proxy_secret": "../proxy.secret"}
    federation.write_node("shop", approval="each", console=people)
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
    assert "Nothing was sent" in browser.ask("/console/data/main")[1]
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
    # Nobody approves what the page does not show yet.
    assert 'value="approve"' not in browser.ask(path)[1]
    checked = wait_until(lambda: browser.ask(path)[1], lambda page: "leaves" in page)
    assert checked.index("leaves") < checked.index('value="approve"')
    csrf = re.findall(r'name="csrf" value="(\w+)"', checked)[0]
    assert browser.ask(path, {"csrf": csrf, "action": "approve"})[0] == 303
    # The hub may not have answered yet, so the page loads itself again.
    _, page, facts = browser.ask(path)
    assert 'value="approve"' not in page
    assert "refresh" in facts
    assert federation.wait_for_state(number, "done", at="shop")["votes"]["shop"] == ["approve"]
    page = browser.ask(path)[1]
    assert ">done<" in page
    assert f"node/runs/{number[:16]}/{number[:16]}</code>" in page
    live = browser.ask(f"{path}/run")[1]
    assert "1 of 1" in live
    assert "Metrics are at the active party" in live
    # The amounts of all runs are added up, whether or not the policy requires grants.
    again = federation.submit(make_recipe(name="again", epochs=2))
    federation.wait(again, lambda row: "bank" in row["votes"], at="shop")
    federation.ask("shop", f"/v1/proposals/{again}/approve", {})
    federation.wait_for_state(again, "done")
    spent = federation.ask("bank", "/v1/data/main")["account"]
    assert [(row["peer"], row["runs"]) for row in spent] == [("shop", 2)]
    assert "<td>bank</td><td>240</td><td>2</td>" in browser.ask("/console/data/main")[1]
    curves = federation.ask("bank", f"/v1/proposals/{again}/progress")["curves"]
    (loss,) = (c for c in curves if (c["phase"], c["split"], c["metric"]) == LOSS)
    assert [round_ for round_, _ in loss["points"]] == [1, 2]


def test_a_report_can_do_nothing(console: tuple[Standing, Browser]) -> None:
    federation, browser = console
    number = federation.submit(make_recipe())
    federation.wait(number, lambda row: "bank" in row["votes"], at="shop")
    path = f"/console/proposals/{number}/report"
    assert browser.ask(path)[0] == 303
    sign_in(federation, browser)
    assert browser.ask(path)[0] == 404
    folder = federation.folder / "shop" / "node" / "runs" / number[:16] / number[:16] / "shop"
    folder.mkdir(parents=True)
    (folder / "report.html").symlink_to(federation.folder / "shop" / "node" / "api.token")
    assert browser.ask(path)[0] == 404
    (folder / "report.html").unlink()
    (folder / "report.html").write_text("<script>alert(1)</script>")
    status, _, facts = browser.ask(path)
    assert status == 200
    assert facts["content-security-policy"].startswith("default-src 'none'")
    assert facts["content-security-policy"].endswith("sandbox")


def test_people_behind_a_proxy_have_roles(console: tuple[Standing, Browser]) -> None:
    federation, browser = console
    number = federation.submit(make_recipe(epochs=1))
    federation.wait(number, lambda row: "bank" in row["votes"], at="shop")
    path, trust = f"/console/proposals/{number}", "/console/members/bank"

    def ask(name: str, path: str, form: dict[str, str] | None = None, secret: str = SECRET) -> Any:
        headers = {"X-Forwarded-Email": f"{name}@example.org", "X-VFL-Proxy-Secret": secret}
        return browser.ask(path, form, **headers)

    def read_page(name: str) -> str:
        return str(ask(name, path)[1])

    for wrong in ("", "y" * 40, SECRET + "x"):
        assert ask("ann", path, secret=wrong)[2]["location"] == "/console/login"
        assert ask("ann", path, {"action": "approve"}, wrong)[2]["location"] == "/console/login"
    assert ask("eve", path)[0] == 403
    tokens = {}
    for name in ("ann", "bob", "vic"):
        page = wait_until(partial(read_page, name), lambda page: "leaves" in page)
        assert ('value="approve"' in page) == (name != "vic")
        tokens[name] = re.findall(r'name="csrf" value="(\w+)"', page)[0]
    for name, csrf in (("vic", tokens["vic"]), ("bob", tokens["ann"]), ("bob", "")):
        assert ask(name, path, {"action": "approve", "csrf": csrf})[0] == 403
    pin = federation.ask("shop", "/v1/members")["bank"]["pin"]
    assert ask("bob", trust, {"pin": pin, "csrf": tokens["bob"]})[0] == 403
    assert "has changed again" in ask("ann", trust, {"pin": "x", "csrf": tokens["ann"]})[1]
    assert ask("ann", trust, {"pin": pin, "csrf": tokens["ann"]})[0] == 303
    assert ask("bob", path, {"action": "approve", "csrf": tokens["bob"]})[0] == 303
    log = (federation.folder / "shop" / "node" / "log.jsonl").read_text().splitlines()
    decisions = [line for line in map(json.loads, log) if line.get("event") == "decision"]
    people = [(line["person"], line["action"]) for line in decisions]
    assert people == [("ann@example.org", "trust"), ("bob@example.org", "approve")]
    federation.wait_for_state(number, "done")


def make_request(**headers: tuple[str, ...]) -> Request:
    pairs = [(k.replace("_", "-"), v) for k, values in headers.items() for v in values]
    raw = [(name.lower().encode(), value.encode()) for name, value in pairs]
    return Request({"type": "http", "headers": raw})


def test_a_proxy_sends_one_name_and_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    settings = ConsoleSettings(roles={"*": "viewer"}, proxy_secret=str(path))
    sessions = Sessions("token", settings)
    good = make_request(x_forwarded_email=("a@b",), x_vfl_proxy_secret=(SECRET,))
    assert (sessions.find_person(good).name, sessions.find_person(good).role) == ("a@b", "viewer")
    for names in ((), ("a@b", "c@d"), ("a@b, c@d",), ("",), ("owner of the token",)):
        with pytest.raises(HTTPException, match="403"):
            sessions.find_person(
                make_request(x_forwarded_email=names, x_vfl_proxy_secret=(SECRET,))
            )
    for secrets in ((), (SECRET, SECRET), ("",)):
        with pytest.raises(HTTPException, match="303"):
            sessions.find_person(
                make_request(x_forwarded_email=("a@b",), x_vfl_proxy_secret=secrets)
            )
    path.write_text("short")
    with raises(InputError, Code.FILE_INVALID, names=str(path)):
        Sessions("token", settings)


def test_others_can_do_nothing(console: tuple[Standing, Browser]) -> None:
    federation, browser = console
    assert browser.ask("/console/login", {"token": "x" * 2**19})[0] == 413
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


def test_the_link_of_the_ready_line_signs_in_once(console: tuple[Standing, Browser]) -> None:
    _, browser = console
    path = "/console/login" + browser.url.rpartition("/login")[2]
    assert browser.ask(path[:-1] + "x")[0] == 403
    status, _, facts = browser.ask(path)
    assert (status, facts["location"]) == (303, "/console")
    page = browser.ask("/console")[1]
    assert "Members" in page
    # A node knows its own key.
    assert "another key" not in page
    status, page, _ = Browser(browser.url).ask(path)
    assert status == 403
    assert "was used" in page


def test_a_proposal_that_cannot_be_checked_can_be_denied(
    console: tuple[Standing, Browser],
) -> None:
    federation, browser = console
    sign_in(federation, browser)
    asked = {"recipe": make_recipe(), "data": {"bank": "main", "shop": "absent"}}
    number = federation.ask("bank", "/v1/proposals", asked)["id"]
    federation.wait(number, lambda row: "bank" in row["votes"], at="shop")
    path = f"/console/proposals/{number}"
    page = wait_until(lambda: browser.ask(path)[1], lambda page: "asks for the data set" in page)
    csrf = re.findall(r'name="csrf" value="(\w+)"', page)[0]
    assert browser.ask(path, {"csrf": csrf, "action": "deny"})[0] == 303
    federation.wait_for_state(number, "denied", at="shop")
