"""MocoSFL between processes gives the parameters of one process; its forecast is what is counted;
it resumes.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from tests.harness import cases, reference_mocosfl
from tests.harness.errors import assert_names, raises
from tests.harness.federation import Federation
from tests.harness.memory import in_process, parameters
from tests.harness.present import present
from tests.integration.test_exact import TOLERANCE, federated, largest_deviation
from tests.integration.test_ssl_phases import check_kill
from vfl.library.model import Model
from vfl_common.bundle import StepKey
from vfl_common.config.data import DataSettings
from vfl_common.config.models import MlpSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.assembly.party import Assembled
from vfl_party.assembly.trial import try_parties, try_party
from vfl_party.base.devices import get_real_dtype
from vfl_party.base.seeds import batches, derive_seed, split_rows, stratify_order
from vfl_party.data import load_table
from vfl_party.forecast.count import Outlook, forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger
from vfl_party.methods.mocosfl.phase import ActiveMocoSFL
from vfl_party.methods.mocosfl.settings import MocoSFLSettings, check_phase
from vfl_party.methods.mocosfl.steps import StepPlan
from vfl_party.models import seed_torch
from vfl_party.models.halves import Halves, Tail
from vfl_party.phases.context import Hooks

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two clients": (2, {}),
    "four clients": (4, {}),
    "two clients as released": (2, {"preset": "released"}),
    "two averages an epoch, a bottleneck": (
        3,
        {"averages_per_epoch": 2, "bottleneck": {"channels": 2, "stride": 2}},
    ),
    "a frozen bottom": (2, {"frozen": True}),
    "three of seven drawn": (7, {"sample": 0.4, "epochs": 5}),
    "one of three drawn as released, two averages": (
        3,
        {"sample": 0.3, "epochs": 4, "preset": "released", "averages_per_epoch": 2},
    ),
    "a memory for each": (3, {"shared_memory": False, "queue": 30}),
    "a memory for each of two of five drawn": (
        5,
        {"shared_memory": False, "queue": 30, "sample": 0.4, "epochs": 4},
    ),
    "default views": (2, {"augment": {"flip": 0.0}}),
    "default views as released": (2, {"augment": {"flip": 0.0}, "preset": "released"}),
    "a query that is a view": (2, {"query": "view"}),
    "another rate for the bottoms": (
        3,
        {"bottom_optimizer": cases.MOCO["optimizer"] | {"lr": 0.15, "weight_decay": 0.01}},
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", list(CASES))
def test_equals_one_process(case: str, tmp_path: Path) -> None:
    clients, settings = CASES[case]
    check(tmp_path, cases.own_rows_recipe(clients, **settings), cases.own_rows(clients))


@pytest.mark.usefixtures("float64")
def test_a_party_with_fewer_rows_begins_them_again(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    data["p2"]["limit"] = 50
    check(tmp_path, cases.own_rows_recipe(2), data)


@pytest.mark.usefixtures("float64")
def test_programs_equal_one_process(tmp_path: Path) -> None:
    tables, data = cases.own_rows_recipe(2), cases.own_rows(2)
    found, want = federated(tmp_path, tables, data), reference_mocosfl.train(tables, data)
    trained = {name: {key: found[name][key] for key in want[name]} for name in want}
    assert largest_deviation(trained, want) <= TOLERANCE


def check(
    tmp_path: Path, tables: dict[str, Any], data: dict[str, Any], tolerance: float = TOLERANCE
) -> None:
    want = reference_mocosfl.train(tables, data)
    in_process(tmp_path / "run", tables, data)
    found = {}
    for name, weights in want.items():
        got = parameters(tmp_path / "run" / name)
        found[name] = {key: got[key] for key in weights}
    assert largest_deviation(found, want) <= tolerance


@pytest.mark.parametrize("victim", ["p1", "p0", "server"])
def test_a_killed_process_changes_nothing_bit_for_bit(victim: str, tmp_path: Path) -> None:
    tables = cases.own_rows_recipe(2, epochs=6, preset="released" if victim == "p1" else "paper")
    check_kill(tmp_path, tables, cases.own_rows(2), victim)


DRAWN: dict[str, Any] = {"sample": 0.5, "epochs": 8}


@pytest.mark.parametrize("victim", ["p1", "p0", "server"])
def test_a_killed_process_changes_nothing_bit_for_bit_if_clients_are_drawn(
    victim: str, tmp_path: Path
) -> None:
    """The killed client is drawn or not; nobody holds a checkpoint of each round."""
    check_kill(tmp_path, cases.own_rows_recipe(4, **DRAWN), cases.own_rows(4), victim)


def test_who_is_not_drawn_does_nothing_in_a_round(tmp_path: Path) -> None:
    """Nobody hears of it in such a round; after the last one, all have the same bottom."""
    tables, data = cases.own_rows_recipe(5, **DRAWN), cases.own_rows(5)
    summary = in_process(tmp_path / "run", tables, data)
    made = Recipe.model_validate(tables)
    course = StepPlan.of(
        try_parties(with_data(tables, data), tmp_path)["p1"].party, "mocosfl", settings_of(made)
    )
    assert present(course.draw).number == 2
    per = course.steps_per_epoch
    for name in course.parties:
        turns = [round_ for round_ in range(8) if name in course.participants(round_)]
        takes = [round_ for round_ in range(8) if name in course.takers(round_)]
        idle = course.idle(name)
        assert not set(idle) & {0, *turns, *takes}
        assert len({0, *turns, *takes, *idle}) == 8
        sent = {
            (each.receiver, each.kind): each.messages
            for each in summary.bytes.by_link
            if each.sender == name and each.phase == "mocosfl"
        }
        assert sent.get(("p0", "embedding"), 0) == per * len(turns)
        assert sent.get(("server", "weights"), 0) == len(turns)
        assert sent.get(("server", "ack"), 0) == len(set(takes) - set(turns))
    bottoms = [of_model(parameters(tmp_path / "run" / name), "encoder") for name in course.parties]
    for each in bottoms[1:]:
        assert all(torch.equal(each[key], bottoms[0][key]) for key in each)
    assert sum(len(course.idle(name)) for name in course.parties) > 5


def with_data(tables: dict[str, Any], data: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(tables | {"simulate": {"parties": data}})


def settings_of(made: Recipe) -> MocoSFLSettings:
    return MocoSFLSettings.model_validate(made.phases[0].settings)


@pytest.mark.parametrize(
    ("parties", "batch", "averages", "drawn"),
    [(5, 20, 10, 5), (20, 5, 10, 20), (100, 1, 10, 100), (300, 1, 3, 100), (1000, 1, 2, 100)],
)
def test_auto_adjust_is_that_of_the_released_code(
    parties: int, batch: int, averages: int, drawn: int
) -> None:
    found = MocoSFLSettings(auto_adjust=True).adjust(parties)
    assert (found.batch_size, found.averages_per_epoch) == (batch, averages)
    assert round(found.sample * parties) == drawn
    written = MocoSFLSettings(auto_adjust=True, averages_per_epoch=2, sample=0.5)
    assert written.adjust(parties).averages_per_epoch == 2
    assert written.adjust(parties).sample == 0.5
    assert MocoSFLSettings().adjust(parties) == MocoSFLSettings()


def test_auto_adjust_trains_as_if_its_numbers_were_written(tmp_path: Path) -> None:
    data = cases.own_rows(4, limit=300)
    without = {key: each for key, each in cases.MOCO.items() if key != "batch_size"}
    tables = cases.own_rows_recipe(4)
    found = {}
    for name, phase in (
        ("auto", without | {"auto_adjust": True, "averages_per_epoch": 2}),
        ("written", without | {"batch_size": 25, "averages_per_epoch": 2}),
    ):
        in_process(tmp_path / name, tables | {"phases": [phase]}, data)
        found[name] = {each: parameters(tmp_path / name / each) for each in data}
    assert largest_deviation(found["auto"], found["written"]) == 0.0


def of_model(parameters: dict[str, Tensor], model: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{model}."): each
        for key, each in parameters.items()
        if key.startswith(f"{model}.")
    }


def _heads(read: Recipe) -> dict[str, torch.nn.Module]:
    """A linear model, and the MLP of MocoSFL's appendix B.6, with the weights that a probe has."""
    with seed_torch(derive_seed(read.seed, "init", "p0", "top")):
        linear = torch.nn.Linear(8, 10)
    with seed_torch(derive_seed(read.seed, "init", "p0", "probe")):
        mlp = torch.nn.Sequential(
            torch.nn.Linear(8, 16, bias=False),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 10),
        )
    return {"linear": linear, "mlp": mlp}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("head", "labelled"), [("linear", 1.0), ("linear", 0.25), ("mlp", 1.0), ("mlp", 0.25)]
)
def test_a_probe_scores_what_a_model_of_the_features_scores(
    head: str, labelled: float, tmp_path: Path
) -> None:
    """From the trained halves, the digits themselves and their labels, without digests, messages
    and the phase.
    """
    probe = cases.PROBE | {"hidden": [16] if head == "mlp" else [], "labelled": labelled}
    tables, data = cases.own_rows_recipe(2, then=(probe,)), cases.own_rows(2)
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
            with torch.no_grad():
                features.setdefault(split, []).append(
                    tail.features(bottom(torch.from_numpy(table.pixels(of)).to(get_real_dtype())))
                )
            truth.setdefault(split, []).append(labels[[int(table.ids[row]) for row in of]])
    x, y = torch.cat(features["local"]), torch.cat(truth["local"])
    if labelled < 1.0:
        few = np.sort(stratify_order(read.seed, y.numpy())[: round(labelled * len(y))])
        x, y = x[few], y[few]
        assert len(y) == 24
    model = _heads(read)[head]
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(cases.PROBE["epochs"]):
        for batch in batches(read.seed, "probe", epoch, np.arange(len(y)), 128):
            adam.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            adam.step()
        for group in adam.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * (epoch + 1) / cases.PROBE["epochs"])) / 2
    model.eval()
    for split in ("validation", "test"):
        z, t = torch.cat(features[split]), torch.cat(truth[split])
        logits = model(z).detach()
        assert summary.metrics[split]["loss"] == pytest.approx(
            functional.cross_entropy(logits, t).item(), abs=TOLERANCE
        )
        assert summary.metrics[split]["accuracy"] == pytest.approx(
            (logits.argmax(1) == t).float().mean().item()
        )
        near = (functional.normalize(z) @ functional.normalize(x).T).topk(
            cases.PROBE["neighbours"], dim=1
        )
        votes = torch.zeros(len(t), 10)
        for row in range(len(t)):
            for value, index in zip(near.values[row], near.indices[row], strict=True):
                votes[row, y[index]] += math.exp(value / 0.1)
        accuracy = (votes.argmax(1) == t).float().mean().item()
        assert summary.metrics[f"{split} by neighbours"]["accuracy"] == pytest.approx(accuracy)


ALIGNED = {"rows": {"validation": 0.1, "test": 0.1}}


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({}, {"kind": "splitnn", "epochs": 1}),
        (ALIGNED, {}),
        ({}, {"cut": 2}),
        ({}, {"image": [1, 9, 8]}),
        ({}, {"batch_size": 49}),
        ({}, {"averages_per_epoch": 7}),
        ({"model": {"embedding_size": 9, "encoder": {"kind": "cnn", "channels": [4, 8]}}}, {}),
        ({"model": {"embedding_size": 8}}, {}),
        (
            {"model": {"embedding_size": 1, "encoder": {"kind": "cnn", "channels": [1, 1]}}},
            {"image": [1, 1, 1]},
        ),
        ({}, {"image": [4096, 4096, 4096]}),
        ({}, {"queue": 100_000_000_000}),
        ({}, {"queue": 10_000_000, "width": 16_384}),
        ({}, {"bottleneck": {"channels": 1_000_000}}),
        ({}, {"frozen": True, "bottom_optimizer": {}}),
        ({}, {"frozen": True, "sample": 0.5}),
        ({}, {"shared_memory": False, "queue": 1}),
    ],
    ids=[
        "rows of all",
        "aligned",
        "cut",
        "image",
        "batch",
        "averages",
        "width",
        "mlp",
        "small image",
        "large image",
        "long queue",
        "large queue",
        "bottleneck",
        "frozen",
        "frozen drawn",
        "no memory",
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    change: dict[str, Any], phase: dict[str, Any], tmp_path: Path
) -> None:
    tables, data = cases.own_rows_recipe(2) | change, cases.own_rows(2)
    tables["phases"] = [phase if phase.get("kind") else cases.MOCO | phase]
    with raises(InputError, Code.CONFIG_INVALID, Code.MODEL_INVALID):
        in_process(tmp_path / "run", tables, data)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*/checkpoints/*"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("width", 16), ("bottleneck", {"channels": 2}), ("image", [1, 16, 16])],
    ids=["width", "bottleneck", "image"],
)
def test_all_phases_train_one_network(key: str, value: Any, tmp_path: Path) -> None:
    tables = cases.own_rows_recipe(2, then=(cases.MOCO | {"name": "again", key: value},))
    with raises(InputError, Code.CONFIG_INVALID):
        in_process(tmp_path / "run", tables, cases.own_rows(2))
    start = {"run": "before", "phases": [cases.MOCO]}
    made = Recipe.model_validate(cases.own_rows_recipe(2, **{key: value}) | {"start": start})
    settings = MocoSFLSettings.model_validate(made.phases[0].settings)
    with raises(InputError, Code.CONFIG_INVALID, names="start.phases"):
        check_phase(made, "mocosfl", settings)


def test_a_party_has_no_encoder_of_its_own(tmp_path: Path) -> None:
    tables = cases.own_rows_recipe(2)
    tables["parties"][1]["encoder"] = {"kind": "mlp"}
    with raises(InputError, Code.CONFIG_INVALID, names=("parties.p1.encoder", "model.encoder")):
        in_process(tmp_path / "run", tables, cases.own_rows(2))
    made = Recipe.model_validate(cases.own_rows_recipe(2))
    own = MlpSettings()
    with raises(InputError, Code.CONFIG_INVALID, names=("model.encoder", "p1")):
        try_party(made, "p1", DataSettings(**cases.own_rows(2)["p1"]), own)


def test_rows_of_another_file_are_refused(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    data["p1"]["unaligned"] = "sklearn:digits"
    with raises(InputError, Code.CONFIG_INVALID, names=("data.unaligned", "rows.align")):
        in_process(tmp_path / "run", cases.own_rows_recipe(2), data)


@pytest.mark.parametrize(
    "settings",
    [
        {"frozen": True},
        {"averages_per_epoch": 1},
        {"sample": 0.5},
        {"auto_adjust": True},
        {"shared_memory": False},
        {"then": ({"kind": "splitnn", "epochs": 1},)},
    ],
    ids=["frozen", "averages", "sample", "auto", "memory", "then"],
)
def test_what_means_nothing_to_a_party_that_is_alone(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        alone_with(tmp_path, **settings)


@pytest.mark.parametrize("scale", [None, "standard"])
def test_resistance_needs_pixels_from_0_to_1(scale: str | None, tmp_path: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("data.scale", "p0")):
        alone_with(tmp_path, **RESIST, scale=scale)


def test_only_the_first_phase_hands_out(tmp_path: Path) -> None:
    """A second phase goes on with the bottoms of the first, as if they had come from an earlier
    run.
    """
    alone = cases.own_rows_recipe(0) | {"parties": [{"name": "p0", "role": "active"}], "rows": {}}
    own = {"p0": {"source": "sklearn:digits", "limit": 60, "scale": "minmax", "label": "target"}}
    in_process(tmp_path / "before", alone, own)
    start = {"run": "before", "held_by": "active", "phases": alone["phases"]}
    frozen = cases.MOCO | {"name": "again", "frozen": True, "epochs": 1}
    one, two = (
        cases.own_rows_recipe(2, epochs=1, then=then) | {"start": start} for then in ((), (frozen,))
    )
    in_process(tmp_path / "one", one, cases.own_rows(2))
    summary = in_process(tmp_path / "two", two, cases.own_rows(2))
    for name in ("p1", "p2"):
        got, want = (
            of_model(parameters(tmp_path / run / name), "encoder") for run in ("two", "one")
        )
        assert all(torch.equal(got[key], want[key]) for key in want)
    probe = one | {"phases": [cases.PROBE, cases.MOCO]}
    with raises(InputError, Code.CONFIG_INVALID, names="start.held_by"):
        in_process(tmp_path / "early", probe, cases.own_rows(2))
    sent = [each for each in summary.bytes.by_link if each.phase == "again" and each.sender == "p0"]
    assert sum(each.payload_bytes for each in sent) == 0


@pytest.mark.parametrize("huge", [True, False])
def test_numbers_too_large_are_told_by_whose_they_are(huge: bool, tmp_path: Path) -> None:
    """A gradient that is not finite does not leave: without the check, the others would blame the
    active party.
    """
    made = Recipe.model_validate(
        cases.own_rows_recipe(2) | {"simulate": {"parties": cases.own_rows(2)}}
    )
    active = try_parties(made, tmp_path)["p0"]
    phase = active.phases[0]
    assert isinstance(phase, ActiveMocoSFL)
    z = {name: {key: torch.rand(8, 4, 4, 4) for key in ("q", "k")} for name in ("p1", "p2")}
    if huge:
        z["p2"]["q"] *= 3e38
    else:
        with torch.no_grad():
            for each in active.party.models["tail"].parameters():
                each.mul_(math.inf)
    answers = Answers(z)
    phase._latents = answers  # type: ignore[assignment]
    with raises(PeerError if huge else InputError, Code.NON_FINITE) as caught:
        phase._run_step(StepKey("mocosfl", 0, 0))
    assert ("p2" if huge else "p0") in str(caught.value)
    assert not answers.replied


class Answers:
    """Stands in for the exchange of a step."""

    def __init__(self, received: dict[str, dict[str, Tensor]]) -> None:
        self._received, self.replied = received, False

    def collect(self, _step: StepKey, **_sizes: Any) -> dict[str, dict[str, Tensor]]:
        return self._received

    def reply(self, _step: StepKey, _tensors: Any) -> None:
        self.replied = True


def test_a_party_whose_bottom_diverged_says_so_itself(tmp_path: Path) -> None:
    made = Recipe.model_validate(
        cases.own_rows_recipe(2) | {"simulate": {"parties": cases.own_rows(2)}}
    )
    passive = try_parties(made, tmp_path)["p1"]
    with torch.no_grad():
        for each in passive.party.models["encoder"].parameters():
            each.fill_(math.nan)
    with raises(InputError, Code.NON_FINITE, names="p1"):
        passive.phases[0].run_round(0)


def test_an_epoch_that_is_far_longer_than_a_party_s_rows_is_worth_a_word() -> None:
    settings = MocoSFLSettings(batch_size=8)
    held = {"p1": {"local": 10}, "p2": {"local": 1009}}
    course = StepPlan("mocosfl", settings, held, False, True)
    assert_names(course.warn_of_long_epoch("p1"), "p1", "p2")
    assert course.warn_of_long_epoch("p2") == ""


def test_images_are_scaled_alike_at_all_parties(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    data["p2"]["scale"] = "standard"
    with raises(InputError, Code.CONFIG_INVALID, names="data.scale"):
        in_process(tmp_path / "run", cases.own_rows_recipe(2), data)


def test_a_probe_without_any_known_label_says_so(tmp_path: Path) -> None:
    data = cases.own_rows(2)
    (tmp_path / "labels.csv").write_text("who,digit\nann,1\nbob,2\n")
    data["p0"] = {
        "source": str(tmp_path / "labels.csv"),
        "id": "who",
        "label": "digit",
        "columns": [],
    }
    with raises(InputError, Code.DATA_INVALID, names="p0"):
        in_process(tmp_path / "run", cases.own_rows_recipe(2, then=(cases.PROBE,)), data)


def test_too_few_labels_for_a_probe_are_refused(tmp_path: Path) -> None:
    probe = cases.PROBE | {"labelled": 0.01, "hidden": [16]}
    with raises(InputError, Code.DATA_INVALID, names=("0.01", "96")):
        in_process(tmp_path / "run", cases.own_rows_recipe(2, then=(probe,)), cases.own_rows(2))


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
        started = [
            event for event in federation.programs["server"].seen() if event["event"] == "started"
        ]
        # It went on after the training.
        assert started[-1]["checkpoint"]
        assert largest_deviation({"p0": federation.parameters("p0")}, {"p0": whole}) == 0.0


@pytest.mark.parametrize("more", [{}, {"sample": 0.4, "epochs": 5}], ids=["all", "drawn"])
def test_the_forecast_is_what_is_counted(more: dict[str, Any], tmp_path: Path) -> None:
    """Also if the parties hold different numbers of rows, and some have nothing to send at a
    step.
    """
    tables = cases.own_rows_recipe(3, then=(cases.PROBE,), averages_per_epoch=2, **more)
    data = cases.own_rows(3)
    data["p3"]["limit"] = 60
    made = with_data(tables, data)
    for each in try_parties(made, tmp_path).values():
        assert each.party.rows.data.holdings["p3"]["local"] == 16
    said = forecast(outlook_of(made, tmp_path))
    summary = in_process(tmp_path / "run", tables, data)
    links = compare_with_ledger(said, summary.bytes)
    assert {link.phase for link in links} == {"open", "mocosfl", "probe"}
    assert [link for link in links if link.forecast != link.counted] == []


def test_a_forecast_needs_no_data_but_how_many_rows_each_party_has(tmp_path: Path) -> None:
    tables, data = cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2)
    made = Recipe.model_validate(tables | {"simulate": {"parties": data}})
    with_data, without = (
        forecast(outlook_of(made, tmp_path)),
        forecast(outlook_of(made, tmp_path), rows=60),
    )
    assert without.links == with_data.links
    of_active = Outlook(made, "p0", DataSettings(**data["p0"]), made.model.encoder)
    with raises(InputError, Code.CONFIG_INVALID, names=("--rows", "p0")):
        forecast(of_active)


NECK: dict[str, Any] = {"bottleneck": {"channels": 2, "stride": 2}}


def test_a_bottom_that_the_active_party_hands_out(tmp_path: Path) -> None:
    """TAResSFL's transfer: it has trained both halves alone, on rows of its own."""
    alone = cases.own_rows_recipe(0, **NECK) | {
        "parties": [{"name": "p0", "role": "active"}],
        "rows": {},
    }
    own = {"p0": {"source": "sklearn:digits", "limit": 60, "scale": "minmax", "label": "target"}}
    in_process(tmp_path / "before", alone, own)
    before = parameters(tmp_path / "before" / "p0")
    assert any(key.startswith("encoder.") for key in before)
    tables = cases.own_rows_recipe(2, frozen=True, then=(cases.PROBE,), **NECK)
    start = {"run": "before", "held_by": "active", "phases": alone["phases"]}
    wide = cases.own_rows_recipe(2, frozen=True)
    with raises(InputError, Code.CONFIG_INVALID, names="start.phases"):
        in_process(tmp_path / "wide", wide | {"start": start}, cases.own_rows(2))
    nobody = tables | {"start": {"run": "before", "phases": alone["phases"]}}
    with raises(InputError, Code.FILE_INVALID, names=("start.run", "start.held_by")):
        in_process(tmp_path / "nobody", nobody, cases.own_rows(2))
    summary = in_process(tmp_path / "run", tables | {"start": start}, cases.own_rows(2))
    for name in ("p1", "p2"):
        got = of_model(parameters(tmp_path / "run" / name), "encoder")
        want = of_model(before, "encoder")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    moved = of_model(parameters(tmp_path / "run" / "p0"), "tail")
    tail = of_model(before, "tail")
    # It started there.
    assert 0 < max((moved[key] - tail[key]).abs().max().item() for key in tail) < 0.5
    weights = sum(4 * each.numel() for each in want.values())
    sent = [
        each for each in summary.bytes.by_link if each.phase == "mocosfl" and each.sender == "p0"
    ]
    # And no gradient.
    assert sum(each.payload_bytes for each in sent) == 2 * weights


@pytest.mark.usefixtures("float64")
def test_momentum_contrast_of_a_party_that_is_alone(tmp_path: Path) -> None:
    """The same as one client that averages with nobody; a probe takes its own rows."""
    alone = cases.own_rows_recipe(0, then=(cases.PROBE,)) | {
        "parties": [{"name": "p0", "role": "active"}],
        "rows": {},
    }
    own = {"p0": {"source": "sklearn:digits", "limit": 120, "scale": "minmax", "label": "target"}}
    summary = in_process(tmp_path / "alone", alone, own)
    assert set(summary.metrics) == {
        "train",
        "validation",
        "test",
        "validation by neighbours",
        "test by neighbours",
    }
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


def alone_with(tmp_path: Path, scale: str | None = "minmax", **settings: Any) -> Assembled:
    tables = cases.own_rows_recipe(0, **settings) | {
        "parties": [{"name": "p0", "role": "active"}],
        "rows": {},
    }
    own = {"source": "sklearn:digits", "limit": 60, "label": "target"} | (
        {"scale": scale} if scale else {}
    )
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
    moved = [
        (one - other).abs().max()
        for one, other in zip(*map(weights, (without, again)), strict=True)
    ]
    assert max(moved) > 0


def weights(of: Assembled) -> list[Tensor]:
    return [each.detach() for each in of.party.models["encoder"].parameters()]


def test_resistance_is_for_one_party(tmp_path: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        in_process(tmp_path / "run", cases.own_rows_recipe(2, **RESIST), cases.own_rows(2))
    with raises(InputError, Code.CONFIG_INVALID, names="batch_size"):
        alone_with(tmp_path, **RESIST, frozen=True)


def test_the_halves_can_be_used_without_the_parties(tmp_path: Path) -> None:
    summary = in_process(
        tmp_path / "run", cases.own_rows_recipe(2, then=(cases.PROBE,)), cases.own_rows(2)
    )
    halves = {name: Model.load(tmp_path / "run", name) for name in ("p0", "p1")}
    for name, model in halves.items():
        model.save(tmp_path / f"{name}.safetensors")
    lower, upper = (Model.load(tmp_path / f"{name}.safetensors") for name in ("p1", "p0"))
    images = (load_digits().images[:1, None] / 16).astype(np.float32)
    assert isinstance(upper.tail, Tail)
    with torch.no_grad():
        logits = present(upper.top)(upper.tail.features(lower.embed(images)))
    assert logits.shape == (1, 10)
    assert summary.metrics["test"]["loss"] < 10
    assert repr(upper).endswith("tail, top)")
