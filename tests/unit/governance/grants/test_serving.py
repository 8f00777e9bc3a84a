"""A program that serves counts rows against its grants, and ends with the last of them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.harness.errors import raises
from tests.harness.granting import DIGEST, PINS, made
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_governance.grants.approval import Approval, GrantGuard, GrantQuery
from vfl_governance.grants.store import GrantStore, day_of, folder_of
from vfl_serve.answering import CombinedLimits, DailyLimit
from vfl_serve.opening import GrantedRows, GrantWatch, MinimumRows


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return load_credentials(issue(folder, "p1"), name="p1")


@pytest.fixture
def approval(tmp_path: Path, credentials: Credentials) -> Iterator[Callable[..., Approval]]:
    """Makes a grant of three rows, in force today unless it is told otherwise."""
    with ExitStack() as stack:

        def make(**more: Any) -> Approval:
            facts = {"predictions": 3, "until": day_of(time.time() + 86_400), **more}
            store = GrantStore(folder_of(tmp_path, "p1"), "p1")
            grant = made(**facts)
            store.add(grant, credentials)
            kept = store.find(grant.grant, credentials)
            asked = GrantQuery(DIGEST, PINS, ("serve",), trains=False)
            return stack.enter_context(closing(Approval(store, kept, asked)))

        yield make


@pytest.mark.parametrize(
    ("ids", "answered"), [(["a"], False), (["a", "a"], False), (["a", "b"], True), ([], False)]
)
def test_a_question_about_too_few_people_has_no_answer(ids: list[str], answered: bool) -> None:
    assert MinimumRows(2).take(ids).tolist() == [answered] * len(ids)


def revoke(of: Approval, folder: Path) -> None:
    """Ends a grant as another program would."""
    other = GrantStore(folder_of(folder, "p1"), "p1")
    assert other.revoke(of.grant.grant, "a test")
    other.close()


def test_limits_count_what_those_before_let_pass(
    tmp_path: Path, approval: Callable[..., Approval]
) -> None:
    granted = approval()
    daily = DailyLimit(tmp_path / "a.sqlite", 1)
    limit = CombinedLimits(daily, None, GrantedRows(granted, "run"))
    assert limit.take(["a", "a", "b"]).tolist() == [True, False, True]
    # The second answer about ``a`` has cost nothing.
    assert limit.take(["c", "d"]).tolist() == [True, False]
    assert limit.take([]).tolist() == []
    daily.close()
    assert np.array_equal(CombinedLimits().take(["a", "b"]), [True, True])


@pytest.mark.parametrize("over", ["revoked", "ended"])
def test_a_grant_that_is_over_answers_nothing(
    over: str, tmp_path: Path, approval: Callable[..., Approval]
) -> None:
    more = {"until": day_of(time.time() - 86_400)} if over == "ended" else {}
    granted = approval(**more)
    if over == "revoked":
        revoke(granted, tmp_path)
    assert GrantedRows(granted, "run").take(["a", "b"]).tolist() == [False, False]
    for refused in (
        lambda: granted.takes_all("run", 1),
        lambda: granted.takes("joint", 1),
        lambda: granted.begins("joint"),
        granted.goes_on,
    ):
        # The day differs from run to run.
        with raises(InputError, Code.REFUSED):
            refused()


def test_all_or_none_at_the_active_party(approval: Callable[..., Approval]) -> None:
    granted = approval()
    with raises(InputError, Code.REFUSED, names=("policy.approval", "p1")):
        granted.takes_all("run", 4)
    granted.takes_all("run", 3)
    granted.takes_all("run", 0)
    with raises(InputError, Code.REFUSED, names=("policy.approval", "p1")):
        granted.takes_all("run", 1)


def test_an_id_of_a_run_that_is_used_again_is_no_gift(
    tmp_path: Path, credentials: Credentials
) -> None:
    """The server chooses the ids of runs. A program goes on with a run as often as it must."""
    grant = made(until=day_of(time.time() + 86_400))
    with closing(GrantStore(folder_of(tmp_path, "p1"), "p1")) as store:
        store.add(grant, credentials)
        kept = store.find(grant.grant, credentials)
        asked = GrantQuery(DIGEST, PINS, ("splitnn",))
        first = Approval(store, kept, asked)
        first.begins("a")
        first.begins("a")
        Approval(store, kept, replace(asked, run="a")).begins("a")
        with raises(InputError, Code.REFUSED, names=("policy.approval", "p1")):
            Approval(store, kept, asked).begins("a")
        assert store.uses(grant.grant).runs == {"a"}


def test_a_prediction_that_begins_again_counts_other_rows(
    tmp_path: Path, approval: Callable[..., Approval]
) -> None:
    """A peer has it begin again, with other rows of its own."""
    guard = GrantGuard(cast(Any, None), trained=tmp_path)
    guard._approval = approval(predictions=5)
    guard.count_use(["a", "b", "c"])
    guard.count_use(["c", "a", "b"])
    guard.count_use(["c", "d"])
    with raises(InputError, Code.REFUSED, names=("policy.approval", "p1")):
        guard.count_use(["e", "f"])
    guard.count_use(["e"])


def test_a_program_ends_with_the_last_of_its_grants(
    tmp_path: Path, approval: Callable[..., Approval]
) -> None:
    one, other = (approval(grant=digit * 12) for digit in "12")
    said: list[str] = []
    failed = queue.SimpleQueue[BaseException]()

    def say(event: str, **facts: str) -> None:
        said.append(f"{event}: {facts['said']}")

    watch = GrantWatch(lambda: [one, other], failed, say)
    watch.look()
    assert said == []
    revoke(one, tmp_path)
    watch.look()
    watch.look()
    (told,) = said
    assert one.grant.grant in told
    # A run that is served no longer does not keep the program alive.
    other.close()
    with raises(InputError, Code.REFUSED):
        watch.look()
    one.close()
    watch.look()
