"""What is used of a grant is counted once, by however many programs, and outlives them."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.harness.errors import raises
from tests.harness.granting import made
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_governance.grants.store import USES, GrantStore, folder_of, read_file


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return {name: load_credentials(issue(folder, name), name=name) for name in ("p0", "p1")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GrantStore]:
    with closing(GrantStore(folder_of(tmp_path, "p1"), "p1")) as found:
        yield found


def test_a_grant_is_kept_as_it_was_signed(
    store: GrantStore, members: dict[str, Credentials], tmp_path: Path
) -> None:
    older, newer = made(), made(grant="ba9876543210", at=1_799_000_001)
    path = store.add(older, members["p1"])
    store.add(newer, members["p1"])
    assert [each.grant for each in store.all(members["p1"])] == [newer, older]
    assert store.find("012", members["p1"]).grant == older
    # The signature holds for whoever trusts the CA.
    assert read_file(path, members["p0"]).grant == older
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((store.folder / USES).stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    for name in ("", "ffff", "0123456789abc"):
        with raises(InputError, Code.CONFIG_INVALID, names="p1"):
            store.find(name, members["p1"])


def test_a_grant_that_was_changed_is_refused(
    store: GrantStore, members: dict[str, Credentials]
) -> None:
    path = store.add(made(), members["p1"])
    more = path.with_name("ba9876543210.json")
    more.write_text(path.read_text())
    # Under another name it would be counted anew.
    with raises(InputError, Code.FILE_INVALID, names="p1"):
        store.all(members["p1"])
    more.unlink()
    envelope = json.loads(path.read_text())
    envelope["payload"] = envelope["payload"][:-8] + "AAAAAAA="
    path.write_text(json.dumps(envelope))
    with raises(InputError, Code.FILE_INVALID, names="p1"):
        store.all(members["p1"])


def test_a_run_is_counted_once(store: GrantStore) -> None:
    grant = made()
    assert [store.count_run(grant, run) for run in ("a", "a", "b", "c", "a")] == [
        True,
        True,
        True,
        False,
        True,
    ]
    with closing(GrantStore(store.folder, "p1")) as again:
        assert again.uses(grant.grant).runs == {"a", "b"}
        assert again.revoke(grant.grant, "over")
        assert not again.revoke(grant.grant, "again")
    assert store.uses(grant.grant).why == "over"
    # It does not even go on.
    assert not store.count_run(grant, "a")
    assert store.take_rows(grant, "served", 1) == 0


def test_rows_are_counted_up_to_the_last(store: GrantStore) -> None:
    grant = made()
    assert store.take_rows(grant, "joint", 4, whole=True) == 4
    assert store.take_rows(grant, "served", 7, whole=True) == 0
    assert store.take_rows(grant, "served", 4) == 4
    assert store.take_rows(grant, "served", 4) == 2
    assert store.take_rows(grant, "served", 4) == 0
    assert store.uses(grant.grant).predictions == 10
    assert store.uses("ffffffffffff").predictions == 0


def test_programs_that_count_at_once_share_what_there_is(store: GrantStore) -> None:
    """Two programs with a file each, and eight threads: no row is given twice."""
    grant, stores = made(predictions=50), (store, GrantStore(store.folder, "p1"))
    with ThreadPoolExecutor(8) as pool:
        taken = [*pool.map(lambda at: stores[at % 2].take_rows(grant, f"r{at % 3}", 3), range(40))]
    stores[1].close()
    assert sum(taken) == 50
    assert store.uses(grant.grant).predictions == 50


def test_a_peer_is_counted_by_run(store: GrantStore) -> None:
    grant = made()
    for run in ("a", "b", "a"):
        store.see(grant, run)
    assert store.list_runs_shown("p1", grant.grant) == {"a", "b"}
    assert not store.list_runs_shown("p0", grant.grant)


def test_a_damaged_file_of_uses_allows_nothing(store: GrantStore, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "p2")
    folder.mkdir()
    (folder / USES).write_text("no database, but longer than a page's first hundred bytes" * 9)
    with raises(InputError, Code.FILE_INVALID, names=("uses.sqlite", "p2")):
        GrantStore(folder, "p2")
