"""MocoSFL between processes gives the parameters of one process; its forecast is what is counted; it resumes."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from tests.harness import cases, reference_mocosfl
from tests.harness.federation import Federation
from tests.integration.test_exact import largest_deviation
from tests.integration.test_in_process import in_process, parameters
from tests.integration.test_ssl_phases import check_kill
from vfl.library.model import Model
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_party.context import Hooks
from vfl_party.data import load_table
from vfl_party.forecast.count import Outlook, forecast, outlook_of
from vfl_party.forecast.result import against
from vfl_party.models import seeded
from vfl_party.models.halves import Halves, Tail
from vfl_party.party import Assembled
from vfl_party.prediction import load_joint
from vfl_party.seeds import batches, derive_seed, split_rows
from vfl_party.trial import try_parties

TOLERANCE = 1e-5  # absolute, float32, on the CPU, after three rounds
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two clients": (2, {}),
    "four clients": (4, {}),
    "two clients as released": (2, {"preset": "released"}),
    "two averages an epoch, a bottleneck": (3, {"averages_per_epoch": 2, "bottleneck": {"channels": 2, "stride": 2}}),
    "a frozen bottom": (2, {"frozen": True}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_equals_one_process(case: str, tmp_path: Path) -> None:
    clients, settings = CASES[case]
    check(tmp_path, cases.own_rows_recipe(clients, **settings), cases.own_rows(clients))


def test_a_party_with_fewer_rows_begins_them_again(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    data["p2"]["limit"] = 50
    check(tmp_path, cases.own_rows_recipe(2), data)


def check(tmp_path: Path, tables: dict[str, Any], data: dict[str, Any]) -> None:
    want = reference_mocosfl.train(tables, data)
    in_process(tmp_path / "run", tables, data)
    found = {}
    for name, weights in want.items():
        got = parameters(tmp_path / "run" / name)
        found[name] = {key: got[key] for key in weights}
    assert largest_deviation(found, want) <= TOLERANCE


@pytest.mark.parametrize("victim", ["p1", "p0", "server"])
def test_a_killed_process_changes_nothing_bit_for_bit(victim: str, tmp_path: Path) -> None:
    tables = cases.own_rows_recipe(2, epochs=40, preset="released" if victim == "p1" else "paper")
    check_kill(tmp_path, tables, cases.own_rows(2), victim)


def of_model(parameters: dict[str, Tensor], model: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{model}."): each for key, each in parameters.items() if key.startswith(f"{model}.")}


def test_a_probe_scores_what_a_linear_model_of_the_features_scores(tmp_path: Path) -> None:
    """From the trained halves, the digits themselves and their labels, without digests, messages and the phase."""
    tables, data = cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2)
    summary = in_process(tmp_path / "run", tables, data)
    got = {name: parameters(tmp_path / "run" / name) for name in data}
    read = Recipe.model_validate(tables)
    halves = Halves(read.model.encoder, (1, 8, 8), cases.MOCO["cut"])
    tail = halves.tail(cases.MOCO["width"])
    tail.load_state_dict(of_model(got["p0"], "tail"))
    labels = torch.from_numpy(load_digits().target[:120]).long()
    features, truth = dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for split in ("local", "validation", "test"):
        for name in ("p1", "p2"):
            table = load_table(DataSettings(**data[name]), with_label=False)
            of = split_rows(read.seed, len(table.ids), validation=0.1, test=0.1)[split]
            bottom = halves.bottom()
            bottom.load_state_dict(of_model(got[name], "encoder"))
            assert table.images_NCHW is not None
            with torch.no_grad():
                features.setdefault(split, []).append(tail.features(bottom(torch.from_numpy(table.images_NCHW[of]))))
            truth.setdefault(split, []).append(labels[[int(table.ids[row]) for row in of]])
    x, y = torch.cat(features["local"]), torch.cat(truth["local"])
    with seeded(derive_seed(read.seed, "init", "p0", "top")):
        linear = torch.nn.Linear(8, 10)
    adam = torch.optim.Adam(linear.parameters(), lr=1e-3)
    for epoch in range(cases.PROBE["epochs"]):
        for batch in batches(read.seed, "probe", epoch, np.arange(len(y)), 128):
            adam.zero_grad()
            functional.cross_entropy(linear(x[batch]), y[batch]).backward()
            adam.step()
        for group in adam.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * (epoch + 1) / cases.PROBE["epochs"])) / 2
    for split in ("validation", "test"):
        z, t = torch.cat(features[split]), torch.cat(truth[split])
        logits = linear(z)
        assert summary.metrics[split]["loss"] == pytest.approx(functional.cross_entropy(logits, t).item(), abs=1e-5)
        assert summary.metrics[split]["accuracy"] == pytest.approx((logits.argmax(1) == t).float().mean().item())
        near = (functional.normalize(z) @ functional.normalize(x).T).topk(cases.PROBE["neighbours"], dim=1)
        votes = torch.zeros(len(t), 10)
        for row in range(len(t)):
            for value, index in zip(near.values[row], near.indices[row], strict=True):
                votes[row, y[index]] += math.exp(value / 0.1)
        accuracy = (votes.argmax(1) == t).float().mean().item()
        assert summary.metrics[f"{split} by neighbours"]["accuracy"] == pytest.approx(accuracy)


ALIGNED = {"rows": {"validation": 0.1, "test": 0.1}}


@pytest.mark.parametrize(
    ("change", "phase", "words"),
    [
        ({}, {"kind": "splitnn"}, "splitnn: a phase of kind 'splitnn' needs rows that all parties hold"),
        (ALIGNED, {}, 'trains on rows of which each party has its own; set rows.align = "none"'),
        ({}, {"cut": 2}, "cut = 2 is not between two parts of this cnn; possible are 1"),
        ({}, {"image": [1, 9, 8]}, "image = [1, 9, 8], but the rows of p1 are [1, 8, 8]"),
        ({}, {"batch_size": 49}, "batch_size = 49 is more than the 48 training rows of p1"),
        ({}, {"averages_per_epoch": 7}, "averages_per_epoch = 7, but an epoch has 6 steps"),
        ({"model": {"embedding_size": 9, "encoder": {"kind": "cnn", "channels": [4, 8]}}}, {}, "gives 8 features"),
        ({"model": {"embedding_size": 8}}, {}, "an encoder of kind 'mlp' cannot be cut in two"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    change: dict[str, Any], phase: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tables, data = cases.own_rows_recipe(2) | change, cases.own_rows(2)
    tables["phases"] = [phase if phase.get("kind") else cases.MOCO | phase]
    with pytest.raises(InputError, match=re.escape(words)):
        in_process(tmp_path / "run", tables, data)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*/checkpoints/*"))


def test_images_are_scaled_alike_at_all_parties(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    data["p2"]["scale"] = "standard"
    with pytest.raises(InputError, match=re.escape('set data.scale = "minmax" at every party')):
        in_process(tmp_path / "run", cases.own_rows_recipe(2), data)


def test_a_probe_without_any_known_label_says_so(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    (tmp_path / "labels.csv").write_text("who,digit\nann,1\nbob,2\n")
    data["p0"] = {"source": str(tmp_path / "labels.csv"), "id": "who", "label": "digit", "columns": []}
    with pytest.raises(InputError, match="knows the label of no training row"):
        in_process(tmp_path / "run", cases.own_rows_recipe(2, then=(cases.PROBE,)), data)


def test_labels_that_are_corrected_do_not_lose_the_training(tmp_path: Path) -> None:
    tables, data = cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2)
    right = data["p0"]
    (tmp_path / "labels.csv").write_text("who,digit\nann,1\nbob,2\n")
    wrong = {"source": str(tmp_path / "labels.csv"), "id": "who", "label": "digit", "columns": []}
    with Federation(tmp_path / "whole", tables, data) as federation:
        federation.start_all()
        federation.finish()
        whole = federation.parameters("p0")
    with Federation(tmp_path / "again", tables, data | {"p0": wrong}) as federation:
        federation.start_all()
        assert federation.programs["p0"].wait(60) == 2
        for program in federation.programs.values():
            program.wait(60)
        federation.data["p0"] = right
        federation.start_all()
        federation.finish()
        started = [event for event in federation.programs["server"].seen() if event["event"] == "started"]
        assert started[-1]["checkpoint"]  # it went on after the training
        assert largest_deviation({"p0": federation.parameters("p0")}, {"p0": whole}) == 0.0


def test_the_forecast_is_what_is_counted(tmp_path: Path) -> None:
    """Also if the parties hold different numbers of rows, and some have nothing to send at a step."""
    tables, data = cases.own_rows_recipe(3, then=(cases.PROBE,), averages_per_epoch=2), cases.own_rows(3)
    data["p3"]["limit"] = 60
    tables["simulate"] = {"parties": data}
    made = Recipe.model_validate(tables)
    for each in try_parties(made, tmp_path).values():
        assert each.party.holdings["p3"]["local"] == 16
    said = forecast(outlook_of(made, tmp_path))
    summary = in_process(tmp_path / "run", cases.own_rows_recipe(3, then=(cases.PROBE,), averages_per_epoch=2), data)
    links = against(said, summary.bytes)
    assert {link.phase for link in links} == {"open", "mocosfl", "probe"}
    assert [link for link in links if link.forecast != link.counted] == []


def test_a_forecast_needs_no_data_but_how_many_rows_each_party_has(tmp_path: Path) -> None:
    tables, data = cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2)
    made = Recipe.model_validate(tables | {"simulate": {"parties": data}})
    with_data, without = forecast(outlook_of(made, tmp_path)), forecast(outlook_of(made, tmp_path), rows=60)
    assert without.links == with_data.links
    of_active = Outlook(made, "p0", DataSettings(**data["p0"]), made.model.encoder)
    with pytest.raises(InputError, match="p0 does not know how many rows the other parties have: give --rows N"):
        forecast(of_active)


NECK: dict[str, Any] = {"bottleneck": {"channels": 2, "stride": 2}}


def test_a_bottom_that_the_active_party_hands_out(tmp_path: Path) -> None:
    """TAResSFL's transfer: it has trained both halves alone, on rows of its own."""
    alone = cases.own_rows_recipe(0, **NECK) | {"parties": [{"name": "p0", "role": "active"}], "rows": {}}
    own = {"p0": {"source": "sklearn:digits", "limit": 60, "scale": "minmax", "label": "target"}}
    in_process(tmp_path / "before", alone, own)
    before = parameters(tmp_path / "before" / "p0")
    assert any(key.startswith("encoder.") for key in before)
    tables = cases.own_rows_recipe(2, frozen=True, then=(cases.PROBE,), **NECK)
    start = {"run": "before", "held_by": "active", "phases": alone["phases"]}
    wide = cases.own_rows_recipe(2, frozen=True)
    with pytest.raises(InputError, match="bottleneck = C2S2, and this phase no bottleneck; make"):
        in_process(tmp_path / "wide", wide | {"start": start}, cases.own_rows(2))
    nobody = tables | {"start": {"run": "before", "phases": alone["phases"]}}
    with pytest.raises(InputError, match=r'holds no run of p1; .* set start\.held_by = "active"'):
        in_process(tmp_path / "nobody", nobody, cases.own_rows(2))
    summary = in_process(tmp_path / "run", tables | {"start": start}, cases.own_rows(2))
    for name in ("p1", "p2"):
        got = of_model(parameters(tmp_path / "run" / name), "encoder")
        want = of_model(before, "encoder")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    moved = of_model(parameters(tmp_path / "run" / "p0"), "tail")
    tail = of_model(before, "tail")
    assert 0 < max((moved[key] - tail[key]).abs().max().item() for key in tail) < 0.5  # it started there
    weights = sum(4 * each.numel() for each in want.values())
    sent = [each for each in summary.bytes.by_link if each.phase == "mocosfl" and each.sender == "p0"]
    assert sum(each.payload_bytes for each in sent) == 2 * weights  # and no gradient


def test_momentum_contrast_of_a_party_that_is_alone(tmp_path: Path) -> None:
    """The same as one client that averages with nobody; a probe takes its own rows."""
    alone = cases.own_rows_recipe(0, then=(cases.PROBE,)) | {"parties": [{"name": "p0", "role": "active"}], "rows": {}}
    own = {"p0": {"source": "sklearn:digits", "limit": 120, "scale": "minmax", "label": "target"}}
    summary = in_process(tmp_path / "alone", alone, own)
    assert set(summary.metrics) == {"train", "validation", "test", "validation by neighbours", "test by neighbours"}
    assert summary.bytes.total.payload_bytes == 0
    tables = cases.own_rows_recipe(1) | {"rows": {"align": "none"}}
    tables["parties"][1]["name"] = "p0"
    tables["parties"][0]["name"] = "paper-server"
    whole = own["p0"] | {"label": None}
    want = reference_mocosfl.train(tables | {"rows": {"align": "none"}}, {"p0": whole})
    got = parameters(tmp_path / "alone" / "p0")
    bottom = {"p0": {f"encoder.{key}": each for key, each in of_model(got, "encoder").items()}}
    assert largest_deviation(bottom, {"p0": want["p0"]}) <= TOLERANCE


RESIST: dict[str, Any] = {"resist": {"weight": 5.0, "ssim": 0.0}, "batch_size": 16}


def alone_with(tmp_path: Path, **settings: Any) -> Assembled:
    tables = cases.own_rows_recipe(0, **settings) | {"parties": [{"name": "p0", "role": "active"}], "rows": {}}
    own = {"source": "sklearn:digits", "limit": 60, "scale": "minmax", "label": "target"}
    made = Recipe.model_validate(tables | {"simulate": {"parties": {"p0": own}}})
    found = try_parties(made, tmp_path)["p0"]
    found.connect(None, Hooks())
    return found


def test_resistance_is_learnt_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = alone_with(tmp_path, **RESIST)
    first = whole.phases[0].run_round(0).metrics["train"]
    assert 0 < first["ssim"] < 1
    kept = copy.deepcopy((whole.state(), whole.phases[0].state()))
    second = whole.phases[0].run_round(1).metrics
    again = alone_with(tmp_path, **RESIST)
    again.load_state(kept[0])
    again.phases[0].load_state(kept[1])
    assert again.phases[0].run_round(1).metrics == second
    for name, model in whole.party.models.items():
        for key, value in model.state_dict().items():
            assert torch.equal(value, again.party.models[name].state_dict()[key])
    without = alone_with(tmp_path, batch_size=16)
    loss = without.phases[0].run_round(0).metrics["train"]
    assert "ssim" not in loss
    moved = [(one - other).abs().max() for one, other in zip(*map(weights, (without, again)), strict=True)]
    assert max(moved) > 0


def weights(of: Assembled) -> list[Tensor]:
    return [each.detach() for each in of.party.models["encoder"].parameters()]


def test_resistance_is_for_one_party(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="resist is for a party that trains both halves alone"):
        in_process(tmp_path / "run", cases.own_rows_recipe(2, **RESIST), cases.own_rows(2))
    with pytest.raises(InputError, match="remove frozen, or enlarge batch_size"):
        alone_with(tmp_path, **RESIST, frozen=True)


def test_the_halves_can_be_used_without_the_parties(tmp_path: Path) -> None:
    """There is no joint prediction: each row is at one party."""
    summary = in_process(tmp_path / "run", cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2))
    halves = {name: Model.load(tmp_path / "run", name) for name in ("p0", "p1")}
    for name, model in halves.items():
        model.save(tmp_path / f"{name}.safetensors")
    lower, upper = (Model.load(tmp_path / f"{name}.safetensors") for name in ("p1", "p0"))
    images = (load_digits().images[:1, None] / 16).astype(np.float32)
    assert isinstance(upper.tail, Tail)
    assert upper.top is not None
    with torch.no_grad():
        logits = upper.top(upper.tail.features(lower.embed(images)))
    assert logits.shape == (1, 10)
    assert summary.metrics["test"]["loss"] < 10
    assert repr(upper).endswith("tail, top)")
    with pytest.raises(InputError, match="its parties hold different rows, and there is nothing to predict jointly"):
        load_joint(tmp_path / "run", "p1")
