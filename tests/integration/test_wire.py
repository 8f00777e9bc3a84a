"""Packed values between processes: the parameters of one process, the bytes of the forecast, the
same after a kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases, reference, reference_fedhssl, reference_fedonce, reference_mocosfl
from tests.harness.federation import Federation
from tests.harness.memory import in_memory
from tests.integration import test_fedhssl, test_fedonce, test_mocosfl
from tests.integration.test_exact import ROUNDING, federated, largest_deviation
from tests.integration.test_resume import parameters
from tests.integration.test_ssl_phases import check_kill, run
from vfl_common.config.recipe import Recipe
from vfl_common.packing.coders import Bits
from vfl_common.summary import load_summary
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger

CODECS: dict[str, dict[str, Any]] = {
    "8 bits": {"codec": "bits", "bits": 8},
    "4 bits": {"codec": "bits", "bits": 4},
    "4 bits, scales of two bytes": {"codec": "bits", "bits": 4, "scales": "bfloat16"},
    "2 bits to nearest": {"codec": "bits", "bits": 2, "rounding": "nearest"},
    "top-k": {"codec": "topk", "keep": 0.25},
    "random top-k": {"codec": "randtopk", "keep": 3, "alpha": 0.3, "values": "float16"},
    "bfloat16": {"codec": "bfloat16"},
    "float16": {"codec": "float16"},
}


def wired(parties: int, *tables: dict[str, Any], **more: Any) -> dict[str, Any]:
    more["model"] = {"embedding_size": 16} | more.get("model", {})
    return cases.recipe(parties, **more) | {"wire": list(tables)}


@pytest.mark.parametrize("parties", [2, 4])
@pytest.mark.parametrize("codec", list(CODECS))
def test_parties_get_the_parameters_of_one_process(
    codec: str, parties: int, tmp_path: Path, record_property: Any
) -> None:
    tables = wired(parties, CODECS[codec] | {"exchange": "embedding"})
    run = federated if parties == 2 else in_memory
    got, want = (
        run(tmp_path, tables, cases.digits(parties)),
        reference.train(tables, cases.digits(parties)),
    )
    worst = largest_deviation(got, want)
    record_property("largest_deviation", worst)
    assert worst <= ROUNDING
    plain = reference.train({**tables, "wire": []}, cases.digits(parties))
    # So the codec did something.
    assert largest_deviation(want, plain) > 5 * ROUNDING


def test_each_direction_has_its_own_codec_and_the_forecast_is_the_ledger(tmp_path: Path) -> None:
    down = {"codec": "bits", "bits": 8, "exchange": "embedding", "direction": "down"}
    up = {"codec": "topk", "keep": 4, "exchange": "embedding", "direction": "up"}
    tables, data = (
        wired(3, up, down, task={"kind": "binary"}),
        cases.columns("sklearn:breast_cancer", 3, limit=120),
    )
    tables["phases"].append({"kind": "evaluate"})
    with Federation(tmp_path, tables, data) as federation:
        federation.start_all()
        federation.finish()
        assert largest_deviation(parameters(federation), reference.train(tables, data)) <= ROUNDING
        sent = [
            each
            for each in federation.ledger("p1")
            if each.phase == "splitnn" and each.peer == "p0"
        ]
    check_forecast(tables, data, federation)
    rows, epochs = 96, 3
    # As it is: no table names that exchange.
    validation = 12 * 16 * 4 * epochs
    by = {(each.kind, each.direction): each.payload_bytes for each in sent}
    # Four places of four bits, four values.
    assert by["embedding", "sent"] == epochs * rows * (2 + 4 * 4) + validation
    assert by["gradient", "received"] == epochs * rows * (16 + 8)


def check_forecast(
    tables: dict[str, Any], data: dict[str, dict[str, Any]], federation: Federation
) -> None:
    """Asserts that the bytes of every link, phase and kind are as forecast, and that both ends
    counted the same.
    """
    summary = load_summary(federation.run_folder / "summary.json")
    assert summary.bytes.agrees
    recipe = Recipe.model_validate(tables | {"simulate": {"parties": data}})
    links = compare_with_ledger(forecast(outlook_of(recipe, federation.folder)), summary.bytes)
    assert {link.phase for link in links} >= {tables["phases"][0]["kind"]}
    for link in links:
        assert link.forecast == link.counted, link


@pytest.mark.parametrize("rule", ["sum", "mean"])
def test_one_gradient_for_all_is_written_once_and_is_the_same(rule: str, tmp_path: Path) -> None:
    tables = wired(4, CODECS["4 bits"] | {"phase": "splitnn"}, model={"combine": rule})
    got = federated(tmp_path, tables, cases.digits(4))
    assert largest_deviation(got, reference.train(tables, cases.digits(4))) <= ROUNDING


@pytest.mark.parametrize("victim", ["p1", "p0"])
def test_a_killed_party_changes_nothing_bit_for_bit(victim: str, tmp_path: Path) -> None:
    tables = wired(2, CODECS["4 bits"], phase={"epochs": 6})
    check_kill(tmp_path, tables, cases.digits(2, limit=220), victim)


# -- what the server averages, and the upload

MLP = {"kind": "mlp", "hidden": [24]}
WEIGHTS = {"codec": "bits", "bits": 8, "exchange": "weights"}
FEEDBACK = {
    "codec": "bits",
    "bits": 4,
    "exchange": "weights",
    "direction": "up",
    "error_feedback": True,
}


BFLOAT16 = {"codec": "bfloat16", "exchange": "weights"}
NEAREST = {
    "codec": "bits",
    "bits": 4,
    "rounding": "nearest",
    "exchange": "weights",
    "direction": "down",
}


@pytest.mark.parametrize(
    ("wire", "parties"),
    [
        ([WEIGHTS], 2),
        ([WEIGHTS], 4),
        ([FEEDBACK], 2),
        ([FEEDBACK], 4),
        ([BFLOAT16], 2),
        ([NEAREST], 2),
    ],
    ids=[
        *(f"8 bits-{parties}" for parties in (2, 4)),
        *(f"4 bits up with error feedback-{parties}" for parties in (2, 4)),
        "bfloat16-2",
        "4 bits down to nearest-2",
    ],
)
def test_averages_are_those_of_one_process(
    wire: list[dict[str, Any]], parties: int, tmp_path: Path
) -> None:
    tables = test_fedhssl.recipe(parties, "simsiam", MLP, augment={"corruption": 0.2}) | {
        "wire": wire
    }
    data = cases.digits(parties, limit=220)
    towers, encoders, federation = test_fedhssl.federated(tmp_path, tables, data)
    check_forecast(tables, data, federation)
    want = reference_fedhssl.pretrain(tables, data, test_fedhssl.TOP["mlp"])
    worst = max(
        largest_deviation(towers, want[-2]),
        largest_deviation(
            test_fedhssl.without_tops(encoders), test_fedhssl.encoders_only(want[-1])
        ),
    )
    assert worst <= 10 * ROUNDING
    plain = reference_fedhssl.pretrain(tables | {"wire": []}, data, test_fedhssl.TOP["mlp"])
    assert largest_deviation(plain[-1], want[-1]) > 1e-4


def test_latents_and_bottoms_are_those_of_one_process(tmp_path: Path) -> None:
    # With raw queries a latent here lies where float32 decides to which of two packed values it goes.
    tables, data = cases.own_rows_recipe(2, query="view"), cases.own_rows(2)
    tables["wire"] = [
        {"codec": "bits", "bits": 8, "exchange": "latents"},
        {"codec": "bits", "bits": 8, "exchange": "bottoms"},
    ]
    test_mocosfl.check(tmp_path, tables, data, 10 * ROUNDING)
    plain = reference_mocosfl.train(tables | {"wire": []}, data)
    assert largest_deviation(plain, reference_mocosfl.train(tables, data)) > 1e-4


@pytest.mark.parametrize("victim", ["p1", "server"])
def test_error_feedback_is_in_the_checkpoints(victim: str, tmp_path: Path) -> None:
    tables = test_fedhssl.recipe(2, "simsiam", MLP, rounds=6) | {"wire": [FEEDBACK]}
    check_kill(tmp_path, tables, cases.digits(2, limit=220), victim)


@pytest.mark.parametrize("parties", [2, 4])
def test_an_upload_in_four_bits(parties: int, tmp_path: Path) -> None:
    tables, data = test_fedonce.recipe(parties, "binary"), test_fedonce.data(parties, "binary")
    tables["wire"] = [{"codec": "bits", "bits": 4, "phase": "head", "exchange": "upload"}]
    _, federation = run(tmp_path, tables, data)
    want = reference_fedonce.train(tables, data)
    assert largest_deviation(parameters(federation), want) <= 10 * ROUNDING
    n, d = 110 - 2 * 11, 3
    (upload,) = [
        each
        for each in federation.ledger("p1")
        if each.phase == "head" and each.kind == "embedding"
    ]
    assert (
        upload.payload_bytes
        == n * sum(each.nbytes for each in (Bits(4).parts((1, d)) or {}).values())
        == n * 10
    )
