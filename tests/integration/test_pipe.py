"""Steps in flight, micro-batches and local updates give the parameters that decision 0025 defines,
kill or no kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness import cases, reference, reference_pipe
from tests.harness.errors import raises
from tests.harness.memory import in_memory, in_process
from tests.integration.test_exact import ROUNDING, TOLERANCE, federated, largest_deviation
from tests.integration.test_resume import held, kill
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.forecast.count import forecast, outlook_of

SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
ADAM = {"kind": "adam", "lr": 0.003, "schedule": "cosine", "clip_norm": 1.0}
MLP = {"kind": "mlp", "hidden": [16, 12]}
NOISY = MLP | {"dropout": 0.2, "batch_norm": True}
DATA = cases.columns("sklearn:digits", 3, limit=100)
DATA_OF = {2: cases.digits(2), 3: DATA}
# Many updates on a batch make rounding grow.
SLOW = {"sgd": SGD | {"lr": 0.01}, "adam": ADAM | {"lr": 0.001}}
CACHE = {"batches": 3, "uses": 4, "threshold": 0.95}


def piped(
    parties: int, *, encoder: dict[str, Any] = MLP, optimizer: dict[str, Any] = SGD, **more: Any
) -> Any:
    """Two epochs a round, and a checkpoint within them: the pipe runs over the end of one, and
    drains at the other.
    """
    phase = {
        "validate_every": 2,
        "epochs": 4,
        "checkpoint_steps": 12,
        "batch_size": 12,
        "optimizer": optimizer,
    }
    return cases.recipe(
        parties, model={"encoder": encoder, "top": {"hidden": [16]}}, phase=phase | more
    )


def check(
    folder: Path, tables: dict[str, Any], data: dict[str, Any], record: Any, run: Any = in_memory
) -> None:
    worst = largest_deviation(run(folder, tables, data), reference_pipe.train(tables, data))
    record("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("parties", "optimizer"), [(2, ADAM), (3, SGD)], ids=["2-adam", "3-sgd"])
@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
def test_steps_in_flight(
    parties: int, in_flight: int, optimizer: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    # A bias before batch normalisation has no gradient but rounding, which Adam would make a whole
    # step of.
    encoder = MLP | {"dropout": 0.2, "batch_norm": optimizer is SGD}
    tables = piped(parties, optimizer=optimizer, in_flight=in_flight, encoder=encoder)
    check(tmp_path, tables, DATA_OF[parties], record_property)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("parties", "optimizer"), [(2, "adam"), (3, "sgd")])
@pytest.mark.parametrize(
    "more",
    [
        {"in_flight": 2, "predict_weights": True},
        {"in_flight": 6, "predict_weights": True},
        {"in_flight": 3, "micro_batches": 2, "predict_weights": True},
        {"local_updates": 3},
        {"local_updates": 3, "in_flight": 4},
        {"cache": CACHE},
        {"cache": CACHE, "in_flight": 2},
        {"cache": {}},
        {"micro_batches": 2},
        {"micro_batches": 4, "in_flight": 2},
        {"micro_batches": 4, "in_flight": 2, "local_updates": 3},
        {"micro_batches": 2, "in_flight": 4, "cache": CACHE},
    ],
    ids=str,
)
def test_local_updates_and_micro_batches(
    parties: int, optimizer: str, more: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    check(
        tmp_path,
        piped(parties, optimizer=SLOW[optimizer], **more),
        DATA_OF[parties],
        record_property,
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache": CACHE}, {"cache": CACHE | {"threshold": -1.0}}),
        ({"cache": CACHE}, {"cache": CACHE | {"uses": 3}}),
        ({"cache": CACHE}, {"cache": CACHE | {"batches": 4}}),
        ({"local_updates": 3}, {"local_updates": 2}),
        ({"in_flight": 3}, {"in_flight": 2}),
        ({"in_flight": 3}, {"in_flight": 3, "predict_weights": True}),
    ],
    ids=str,
)
def test_each_setting_changes_what_is_learned(one: dict[str, Any], other: dict[str, Any]) -> None:
    data = cases.digits(2)
    found, others = (
        reference_pipe.train(piped(2, optimizer=SLOW["sgd"], **more), data) for more in (one, other)
    )
    assert largest_deviation(found, others) > 100 * ROUNDING


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("parties", [2, 4])
def test_one_step_in_flight_is_what_split_training_was(parties: int) -> None:
    tables = piped(parties)
    tables["phases"][0] |= {"validate_every": 1, "checkpoint_steps": 2000}
    data = cases.digits(parties)
    assert (
        largest_deviation(reference_pipe.train(tables, data), reference.train(tables, data))
        <= TOLERANCE
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "more", [{"in_flight": 4}, {"in_flight": 2, "micro_batches": 3, "cache": CACHE}], ids=str
)
def test_processes(more: dict[str, Any], tmp_path: Path, record_property: Any) -> None:
    check(tmp_path, piped(3, optimizer=SLOW["sgd"], **more), DATA, record_property, federated)


def test_one_process_gives_what_processes_give(tmp_path: Path) -> None:
    tables = piped(3, encoder=NOISY, in_flight=4, cache=CACHE)
    assert (
        largest_deviation(
            in_memory(tmp_path / "one", tables, DATA), federated(tmp_path / "many", tables, DATA)
        )
        == 0.0
    )


STEPS: dict[str, Any] = {"epochs": 8, "validate_every": 1, "batch_size": 8, "in_flight": 4}
STEPS |= {"checkpoint_steps": 6, "optimizer": SLOW["adam"] | {"schedule": "constant"}}
# By a checkpoint.
KEPT: dict[str, dict[str, Any]] = {"ring": {"cache": {}}, "prediction": {"predict_weights": True}}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """{what is kept: parameters} of runs in one process; another test shows that processes give the
    same.
    """
    return {
        what: in_memory(
            tmp_path_factory.mktemp(what), piped(3, encoder=NOISY, **STEPS, **more), DATA
        )
        for what, more in KEPT.items()
    }


@pytest.mark.parametrize(
    ("victim", "kept"),
    [("", "ring"), ("p0", "ring"), ("p2", "ring"), ("server", "ring"), ("p2", "prediction")],
)
def test_in_the_middle_of_a_round_with_several_steps_in_flight(
    victim: str, kept: str, tmp_path: Path, undisturbed: dict[str, dict[str, dict[str, Tensor]]]
) -> None:
    """p1 and p2 are held; then their connections are cut, or one of the programs is killed."""
    tables = piped(3, encoder=NOISY, **STEPS, **KEPT[kept])
    with held(tmp_path, tables, DATA, received=16_000) as (federation, proxy):
        if victim:
            kill(federation, proxy, victim)
        else:
            proxy.cut()
            proxy.release()
        summary = federation.finish()
        # Its new process knows nothing of the end of the old one.
        if victim != "server":
            assert summary["interruptions"] == bool(victim)
        got = {name: federation.parameters(name) for name in federation.names}
    assert largest_deviation(got, undisturbed[kept]) == 0.0


PRIVATE: dict[str, Any] = {
    "kind": "clipped_gaussian",
    "exchange": "embedding",
    "sent_by": "passive",
}
PRIVATE |= {"clip": 1.0, "epsilon": 1.0, "delta": 1e-5}


@pytest.mark.parametrize(
    "change",
    [
        {"transforms": [PRIVATE]},
        {"in_flight": 0},
        {"in_flight": 2, "late_policy": "zeros", "deadline_s": 1.0},
        {"local_updates": 2, "cache": {}},
        {"predict_weights": True},
        {"predict_weights": True, "in_flight": 2, "cache": {}},
        {"micro_batches": 2, "iso": 1.0},
        {"cache": {"threshold": 2.0}},
        {"micro_batches": 2},
    ],
    ids=lambda change: " ".join(change),
)
def test_bad_input_is_one_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID) as caught:
        in_memory(tmp_path, piped(2, encoder=NOISY, **change), cases.digits(2))
    told = str(caught.value)
    assert any(word in told for key in change for word in (key, "clipped_gaussian", "threshold"))


def test_a_party_alone_has_nothing_in_flight(tmp_path: Path) -> None:
    data = cases.columns("sklearn:digits", 1, limit=100)
    with raises(InputError, Code.CONFIG_INVALID, names=("in_flight", "micro_batches")):
        in_memory(tmp_path, piped(1, in_flight=2), data)


@pytest.mark.parametrize(
    "more",
    [
        {"in_flight": 4},
        {"micro_batches": 3, "in_flight": 2, "cache": {}},
        {"max_bytes": 9_000, "in_flight": 2},
    ],
)
def test_the_ledger_is_as_forecast(more: dict[str, Any], tmp_path: Path) -> None:
    tables, data = piped(3, optimizer=SLOW["sgd"], **more), DATA
    recipe = Recipe.model_validate(tables | {"simulate": {"parties": data}})
    said = forecast(outlook_of(recipe, tmp_path))
    summary = in_process(tmp_path / "run", tables, data)
    assert {each for each in said.links if each.message_bytes} == {
        each for each in summary.bytes.by_link if each.phase != "control"
    }
