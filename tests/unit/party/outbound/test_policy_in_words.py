"""What `vfl-party check` says of a policy."""

from __future__ import annotations

from vfl_common.config.base import parse
from vfl_common.config.policy import PolicySettings
from vfl_party.policy.guards import describe_policy


def test_demands_and_the_account_are_told_in_words() -> None:
    demand = {
        "kind": "embedding",
        "transform": "clipped_gaussian",
        "at_least": {"sigma": 2},
        "at_most": {"epsilon": 3, "clip": 0.5},
    }
    tables = {"level": "open", "demands": [demand], "account": {"numbers_of_a_person": 50_000}}
    assert [*describe_policy(parse(PolicySettings, tables, "x"))] == [
        "level = open",
        "demands: clipped_gaussian on embedding, sigma at least 2, epsilon at most 3, clip at most 0.5",
        "account.numbers_of_a_person = 50,000",
    ]
    with_epsilon = parse(PolicySettings, {"level": "open", "account": {"epsilon": 4}}, "x")
    assert [*describe_policy(with_epsilon)][1:] == [
        "account.epsilon = 4.0",
        "account.delta = 1e-05",
    ]
