"""Who may ask a served model, and how often."""

from __future__ import annotations

import contextlib
import os
import stat
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_serve.commands import token
from vfl_serve.tokens import (
    Denied,
    Tokens,
    add_token,
    check_open,
    describe_plain_tokens,
    read_tokens,
    remove_token,
)

MODEL = ("churn", "20260102-030405-churn-1a2b")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def status(tokens: Tokens, given: str | None, models: tuple[str, ...] = MODEL) -> int:
    with pytest.raises(Denied) as caught:
        tokens.check(given, models)
    return caught.value.status


def test_only_the_digest_is_kept(path: Path) -> None:
    secret = add_token(path, "shop")
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = present(Tokens(path).check(secret, MODEL))
    assert found.name == "shop"


def test_nobody_else_may_read_a_file_of_tokens_while_it_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        modes.append(stat.S_IMODE(self.stat().st_mode))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    before = os.umask(0o022)
    try:
        add_token(path, "shop")
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_a_restart_gives_no_rows_again(path: Path, tmp_path: Path) -> None:
    """At most a hundredth of the day's rows is lost by it."""
    now = [datetime(2027, 1, 31, 12, 0, tzinfo=UTC)]
    secret, kept = add_token(path, "shop", rows_a_day=1000), tmp_path / "kept.json"
    for rows, allowed in ((600, True), (600, False), (390, True), (1, False)):
        tokens = Tokens(path, lambda: now[0], kept)
        token = tokens.check(secret, MODEL)
        if allowed:
            tokens.spend(token, rows)
            continue
        with pytest.raises(Denied) as caught:
            tokens.spend(token, rows)
        assert caught.value.status == 429
    now[0] += timedelta(days=1)
    tokens = Tokens(path, lambda: now[0], kept)
    tokens.spend(tokens.check(secret, MODEL), 1000)


def test_a_count_that_cannot_be_kept_lets_nobody_ask(path: Path, tmp_path: Path) -> None:
    secret, kept = add_token(path, "shop", rows_a_day=10), tmp_path / "missing" / "kept.json"
    tokens = Tokens(path, kept=kept)
    with pytest.raises(Denied) as caught:
        tokens.spend(tokens.check(secret, MODEL), 1)
    assert caught.value.status == 503
    (tmp_path / "missing").mkdir()
    kept.write_text("{}")
    with raises(InputError, Code.FILE_INVALID, names="kept.json"):
        Tokens(path, kept=kept)


def test_a_token_that_is_none_opens_nothing(path: Path) -> None:
    secret = add_token(path, "shop")
    tokens = Tokens(path)
    for given in (None, "", secret[:-1], secret + "a", read_tokens(path)[0].sha256):
        assert status(tokens, given) == 401


def test_a_token_is_for_its_models(path: Path) -> None:
    secret = add_token(path, "shop", models=("churn",))
    by_run = add_token(path, "bank", models=(MODEL[1],))
    tokens = Tokens(path)
    assert tokens.check(secret, MODEL) is not None
    assert tokens.check(by_run, MODEL) is not None
    assert status(tokens, secret, ("fraud", "20260102-030405-fraud-1a2b")) == 403


def test_a_token_ends_with_its_last_day(path: Path) -> None:
    now = [datetime(2027, 1, 31, 23, 59, tzinfo=UTC)]
    secret = add_token(path, "shop", until=date(2027, 1, 31))
    tokens = Tokens(path, lambda: now[0])
    assert tokens.check(secret, MODEL) is not None
    now[0] += timedelta(minutes=2)
    assert status(tokens, secret) == 401


def test_a_token_ends_on_a_day_to_come(tmp_path: Path) -> None:
    file = tmp_path / "bank.toml"
    file.write_text(
        'name = "bank"\nrecipe = "recipe.toml"\nserver = "127.0.0.1:7000"\n'
        'tls = { ca = "ca.pem", certificate = "bank.pem", key = "bank.key" }\n'
        f'serve = {{ tokens = "{tmp_path}/tokens.json" }}\n'
    )
    today = datetime.now(UTC).date()
    token.main([str(file), "shop", "--until", str(today)], standalone_mode=False)
    with raises(InputError, Code.CONFIG_INVALID, names=("--until", "2026")):
        token.main([str(file), "late", "--until", "2026-01-31"], standalone_mode=False)
    assert [each.name for each in read_tokens(tmp_path / "tokens.json")] == ["shop"]


def test_rows_are_counted_by_day(path: Path) -> None:
    now = [datetime(2027, 1, 31, tzinfo=UTC)]
    secret = add_token(path, "shop", rows_a_day=10)
    tokens = Tokens(path, lambda: now[0])
    token = tokens.check(secret, MODEL)
    tokens.spend(token, 9)
    with pytest.raises(Denied) as caught:
        tokens.spend(token, 2)
    assert caught.value.status == 429
    # What was refused does not count.
    tokens.spend(token, 1)
    now[0] += timedelta(days=1)
    tokens.spend(token, 10)


def test_rows_that_nobody_was_asked_for_are_given_back(path: Path) -> None:
    now = [datetime(2027, 1, 31, tzinfo=UTC)]
    secret = add_token(path, "shop", rows_a_day=10)
    tokens = Tokens(path, lambda: now[0])
    token = tokens.check(secret, MODEL)
    for status, left in ((503, 10), (422, 1)):
        with pytest.raises(Denied), tokens.spending(token, 9):
            raise Denied(status, "")
        with pytest.raises(Denied):
            tokens.spend(token, left + 1)
    with tokens.spending(token, 1):
        pass
    # Those of yesterday are no credit for today.
    now[0] += timedelta(days=1)
    with contextlib.suppress(Denied), tokens.spending(token, 9):
        now[0] += timedelta(days=1)
        tokens.spend(token, 10)
        raise Denied(503, "")
    with pytest.raises(Denied):
        tokens.spend(token, 1)


def test_a_file_that_changes_is_read_again(path: Path) -> None:
    secret = add_token(path, "shop")
    tokens = Tokens(path)
    remove_token(path, "shop")
    assert status(tokens, secret) == 401
    # A damaged file neither lets anybody in nor ends the program.
    whole = add_token(path, "bank")
    assert tokens.check(whole, MODEL) is not None
    path.write_text("[")
    assert tokens.check(whole, MODEL) is not None
    assert status(tokens, secret) == 401


def test_a_name_is_taken_once_and_must_exist(path: Path) -> None:
    add_token(path, "shop")
    with raises(InputError, Code.CONFIG_INVALID, names=("shop", "tokens.json")):
        add_token(path, "shop")
    with raises(InputError, Code.CONFIG_INVALID, names=("bank", "tokens.json")):
        remove_token(path, "bank")
    path.write_text('[{"name": "shop"}]')
    with raises(InputError, Code.FILE_INVALID, names="tokens.json"):
        Tokens(path)
    path.unlink()
    with raises(InputError, Code.FILE_INVALID, names="tokens.json"):
        Tokens(path)


@pytest.mark.parametrize(
    "keys", [{"http": "0.0.0.0:8080"}, {"http": "192.0.2.1:8080"}, {"certificate": "a.pem"}]
)
def test_a_port_that_others_reach_needs_tokens(keys: dict[str, str]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        check_open(ServeSettings(**keys))  # type: ignore[arg-type]
    open_ = ServeSettings(http="0.0.0.0:8080", tokens="tokens.json")
    check_open(open_)
    # Who is on the way reads the tokens.
    said = present(describe_plain_tokens(open_))
    assert said.startswith("serve.http: without a certificate")
    secret = {"tokens": "tokens.json", "certificate": "a.pem", "key": "a.key"}
    assert describe_plain_tokens(ServeSettings(http="0.0.0.0:8443", **secret)) is None  # type: ignore[arg-type]
    both = ServeSettings(http="0.0.0.0:80", grpc="0.0.0.0:81", tokens="tokens.json")
    assert str(describe_plain_tokens(both)).startswith("serve.http and serve.grpc: ")
    with raises(InputError, Code.CONFIG_INVALID, names=("serve.grpc", "serve.tokens")):
        check_open(ServeSettings(grpc="0.0.0.0:8081"))
    for here in ("127.0.0.1:0", "[::1]:0", "localhost:0"):
        check_open(ServeSettings(http=here))
        assert describe_plain_tokens(ServeSettings(http=here, tokens="tokens.json")) is None
