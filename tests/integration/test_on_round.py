"""``on_round``: called after each round, in one process and over several, with the models if asked."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_party.predict import trained

PARTIES = ("p0", "p1")


def tables(**run: Any) -> dict[str, Any]:
    made = cases.recipe(2, phase={"epochs": 3}, run=run)
    made["phases"].append({"kind": "evaluate"})
    return made | {"simulate": {"parties": cases.digits(2)}}


def weights(model: vfl.Model) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for name in ("encoder", "top"):
        module = getattr(model, name)
        if module is not None:
            found |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    return found


class Watching:
    """Keeps what it was told, and each party's models."""

    def __init__(self) -> None:
        self.rounds: list[vfl.Round] = []
        self.models: dict[tuple[str, str, int], dict[str, torch.Tensor]] = {}

    def __call__(self, each: vfl.Round) -> None:
        self.rounds.append(each)
        self.models[each.party, each.phase, each.round] = weights(each.model())


class WatchingLater(Watching):
    """A party that trains faster than this reader reads has perhaps removed a checkpoint."""

    def __call__(self, each: vfl.Round) -> None:
        with contextlib.suppress(InputError):
            super().__call__(each)


@pytest.fixture(scope="module")
def here() -> tuple[Watching, vfl.Run]:
    watching = Watching()
    return watching, vfl.simulate(tables(), quiet=True, on_round=watching)


def test_the_models_of_a_round_are_those_of_a_run_that_ends_there(
    here: tuple[Watching, vfl.Run],
) -> None:
    watching, run = here
    assert {key[2] for key in watching.models if key[1] == "splitnn"} == {1, 2, 3}
    plain = vfl.simulate(tables(), quiet=True)
    for name in PARTIES:
        of = {at: watching.models[name, "splitnn", at] for at in (1, 2, 3)}
        last = weights(run.model(name))
        assert all(torch.equal(of[3][key], last[key]) for key in last)
        assert not all(torch.equal(of[1][key], of[2][key]) for key in last)
        # Looking changes nothing, also not what is drawn.
        unseen = weights(plain.model(name))
        assert all(torch.equal(unseen[key], last[key]) for key in last)


def test_processes_tell_the_same(here: tuple[Watching, vfl.Run]) -> None:
    watching, theirs = here[0], WatchingLater()
    run = vfl.simulate(tables(), quiet=True, processes=True, on_round=theirs)

    def of(party: str, told: Watching) -> list[vfl.Round]:
        return [each for each in told.rounds if each.party == party]

    for name in PARTIES:
        assert of(name, theirs) == of(name, watching)
        assert len(of(name, theirs)) == 4
    # It keeps three.
    last = {(name, *at) for name in PARTIES for at in [("splitnn", 2), ("splitnn", 3)]}
    assert last < theirs.models.keys() <= watching.models.keys()
    for at, got in theirs.models.items():
        want = watching.models[at]
        assert all(torch.equal(got[key], want[key]) for key in want), at
    assert run.metrics == here[1].metrics


def test_nothing_is_copied_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    of_state = trained.of_state

    def count(*args: Any) -> Any:
        made.append(args)
        return of_state(*args)

    monkeypatch.setattr(trained, "of_state", count)
    told: list[vfl.Round] = []
    vfl.simulate(tables(), quiet=True, on_round=told.append)
    assert (len(told), made) == (8, [])
    vfl.simulate(tables(), quiet=True, on_round=Watching())
    assert len(made) == 8


def test_a_round_that_is_over_has_no_models() -> None:
    told: list[vfl.Round] = []
    vfl.simulate(tables(), quiet=True, on_round=told.append)
    with raises(InputError, Code.CONFIG_INVALID, names="on_round"):
        told[0].model()
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.Round("p0", "splitnn", 1, 3, {}).model()


def test_a_round_without_a_checkpoint_has_no_models_in_processes() -> None:
    def look(each: vfl.Round) -> None:
        # One party only: the order in which processes print their rounds is not fixed.
        if (each.party, each.phase, each.round) == ("p0", "splitnn", 1):
            each.model()

    with raises(InputError, Code.CHECKPOINT_INVALID, names=("run.checkpoint_every", "p0")):
        vfl.simulate(tables(checkpoint_every=2), quiet=True, processes=True, on_round=look)


def test_what_it_raises_ends_processes_and_comes_out_as_it_is() -> None:
    class Enough(Exception):  # noqa: N818 - no error
        pass

    def stop(each: vfl.Round) -> None:
        raise Enough(each.party)

    with pytest.raises(Enough):
        vfl.simulate(tables(), quiet=True, processes=True, on_round=stop)
