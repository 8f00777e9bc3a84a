"""A federation in one process computes what separate processes compute, bit for bit, and fails as
they do.
"""

from __future__ import annotations

import _thread
import json
import threading
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.memory import in_process, parameters
from tests.unit.party.data.test_data_streams import frame, small_blocks
from tests.unit.party.methods.test_probe import known, probe_of
from vfl.simulation.inprocess import run_in_process
from vfl_common.bundle import read_entries
from vfl_common.config.base import Section, read_toml
from vfl_common.config.models import (
    ENCODERS,
    CustomTop,
    ModelSettings,
    OptimizerSettings,
    TopSettings,
)
from vfl_common.config.recipe import Recipe, divide
from vfl_common.config.task import FocalSettings, QuantileSettings, TaskSettings, ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary
from vfl_party.methods.splitnn.settings import CacheSettings, SplitNNSettings
from vfl_party.models import InputSpec
from vfl_party.models.training import EarlyStopping
from vfl_party.outbound import codecs
from vfl_party.outbound.codecs import BitsSettings, TopKSettings
from vfl_party.phases.course import list_kinds

FEW = ("unlabelled_batch_size", "own_batch_size")
# A module in the folder, as people have it beside their recipe.
OWN = {"kind": "custom", "factory": "mine:Casting"}
MINE = """
import torch

class Casting(torch.nn.Module):
    def __init__(self, spec, width):
        super().__init__()
        self.first, self.last = torch.nn.Linear(spec.shape[0], 12), torch.nn.Linear(12, width)

    def forward(self, x):
        assert not torch.backends.cudnn.allow_tf32  # nor anything else that takes the place of float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.last(self.first(x).relu())
        return z.float()

class Rated(torch.nn.Module):
    takes_codes = True

    def __init__(self, spec, width):
        super().__init__()
        codes = sum(spec.cardinalities)
        self.table = torch.nn.Embedding(codes, 3) if codes else None
        numbers = spec.shape[0] + 3 * len(spec.cardinalities)
        self.last = torch.nn.Linear(numbers, width)

    def forward(self, x, codes=None):
        if self.table is not None:
            x = torch.cat([x, self.table(codes).flatten(1)], 1)
        return self.last(x).tanh()

def top(in_features, outputs, width):
    first = torch.nn.Linear(in_features, width)
    return torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Linear(width, outputs))
"""
RATED = {"kind": "custom", "factory": "mine:Rated"}
TOP = {"kind": "custom", "factory": "mine:top", "options": {"width": 9}}
CNN = {"kind": "cnn", "channels": [4, 6]}
MLP = {"kind": "mlp", "hidden": [12], "dropout": 0.5}
EVALUATE = {"kind": "evaluate", "subsets": True, "resamples": 2, "importance": True, "repeats": 2}
SSL = {"rounds": 2, "batch_size": 24, "queue": 32, "projector": [16, 16, 12]}


def made(parties: int, *phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    return cases.recipe(parties, **more) | {"phases": [*phases, EVALUATE]}


def split(**more: Any) -> dict[str, Any]:
    return {"kind": "splitnn", "epochs": 2, "batch_size": 24} | more


def sized(tables: dict[str, Any], widths: dict[str, int]) -> dict[str, Any]:
    """Gives parties embeddings of widths of their own."""
    own = {name: {"embedding_size": width} for name, width in widths.items()}
    return tables | {"parties": [each | own.get(each["name"], {}) for each in tables["parties"]]}


BINARY: dict[str, Any] = {"kind": "binary"}
TABLE = cases.columns("sklearn:breast_cancer", 3, limit=120)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split training with dropout": (
        made(4, split(), model={"encoder": CNN, "top": {"hidden": [8], "dropout": 0.4}}),
        cases.digits(4),
    ),
    "labels only, two bytes a number, early stopping": (
        made(
            3,
            split(codec="float16", epochs=6, early_stopping={"patience": 2}),
            task=BINARY,
            active_features=False,
            model={"encoder": MLP, "combine": "sum"},
        ),
        cases.columns("sklearn:breast_cancer", 2, limit=120, active_features=False),
    ),
    "a late policy": (
        made(
            3,
            split(late_policy="cached", deadline_s=60.0),
            task=BINARY
            | {
                "loss": {"kind": "focal", "gamma": 1.5},
                "class_weight": "balanced",
                "threshold": {"rule": "cost", "false_positive": 1, "false_negative": 3},
                "metrics": ["ks"],
                "positive": 0,
            },
            model={"encoder": MLP},
        ),
        TABLE,
    ),
    "FedHSSL with the server's mean, then split training": (
        made(
            2,
            {"kind": "fedhssl", "ssl": "moco", "predictor": 8, "aggregate": True, **SSL}
            | {"augment": {"flip": 0.0}},
            split(),
            model={"encoder": CNN},
            rows={"aligned": 0.5},
        ),
        cases.digits(2),
    ),
    "SS-VFL, a stratified split": (
        made(
            2,
            {
                "kind": "contrastive",
                "ssl": "simclr",
                **{k: v for k, v in SSL.items() if k != "queue"},
            },
            split(),
            task={"kind": "multiclass", "classes": 10, "label_smoothing": 0.1},
            rows={"split": "stratified", "labelled": 40},
        ),
        cases.digits(2),
    ),
    "FedOnce": (
        made(
            3,
            {"kind": "fedonce", "epochs": 3, "batch_size": 24},
            {
                "kind": "head",
                "epochs": 3,
                "batch_size": 24,
                "own_encoder": "trained",
                "augment": {"corruption": 0.2, "parties": ["p0"]},
            },
            task=BINARY,
            model={"embedding_size": 3, "encoder": MLP},
        ),
        TABLE,
    ),
    "MocoSFL and its probe, warm-up and steps": (
        cases.own_rows_recipe(
            2,
            then=(cases.PROBE | {"optimizer": {"kind": "adamw", "warmup_epochs": 2}},),
            optimizer={"kind": "adamw", "lr": 0.01, "schedule": "step", "step_epochs": 1},
            bottom_optimizer={"kind": "sgd", "lr": 0.05, "warmup_epochs": 1},
        ),
        cases.own_rows(2),
    ),
    "MocoSFL and its probe": (
        cases.own_rows_recipe(3, then=(cases.PROBE,), averages_per_epoch=2),
        cases.own_rows(3),
    ),
    "packed values, another codec each way": (
        made(4, split())
        | {
            "wire": [
                {"codec": "bits", "bits": 4, "exchange": "embedding", "direction": "down"},
                {"codec": "topk", "keep": 4, "exchange": "embedding", "direction": "up"},
            ]
        },
        cases.digits(4),
    ),
    "SecureBoost": (
        made(3, task=BINARY)
        | {
            "phases": [{"kind": "secureboost", "trees": 3, "encryption": "none", "row_sample": 0.7}]
        },
        TABLE,
    ),
    "trees of one party": (
        made(1, {"kind": "gbdt", "trees": 5}, task=BINARY)
        | {"phases": [{"kind": "gbdt", "trees": 5}]},
        cases.columns("sklearn:breast_cancer", 1, limit=120),
    ),
    "bfloat16, several batches and parts of them under way": (
        made(
            4,
            split(
                optimizer={
                    "kind": "sgd",
                    "lr": 0.05,
                    "momentum": 0.9,
                    "weight_decay": 1e-3,
                    "schedule": "cosine",
                },
                in_flight=3,
                predict_weights=True,
                micro_batches=2,
            ),
            model={"encoder": MLP, "top": {"hidden": [8], "dropout": 0.4}, "precision": "bfloat16"},
        )
        | {
            "wire": [
                {
                    "codec": "bits",
                    "bits": 2,
                    "rounding": "nearest",
                    "scales": "bfloat16",
                    "direction": "up",
                }
            ]
        },
        cases.digits(4),
    ),
    "an encoder of one's own that casts by itself, several updates a batch": (
        made(
            3,
            split(
                local_updates=3,
                optimizer={"kind": "adagrad", "clip_norm": 0.5},
                validate_every=2,
                epochs=4,
            ),
            task=BINARY,
            model={"encoder": OWN, "combine": "mean"},
        ),
        TABLE,
    ),
    "bfloat16, an encoder of one's own that casts by itself, labels only": (
        made(
            3,
            split(codec="bfloat16"),
            task=BINARY,
            active_features=False,
            model={"encoder": OWN, "precision": "bfloat16"},
        ),
        cases.columns("sklearn:breast_cancer", 2, limit=120, active_features=False),
    ),
    "bfloat16, a late policy": (
        made(
            3,
            split(late_policy="zeros", deadline_s=60.0),
            task=BINARY | {"threshold": {"rule": "rate", "rate": 0.4}},
            model={"encoder": MLP, "precision": "bfloat16"},
        ),
        TABLE,
    ),
    "updates on earlier batches, so many steps, several rounds an epoch": (
        made(
            3,
            {
                "kind": "splitnn",
                "steps": 10,
                "batch_size": 24,
                "checkpoint_steps": 2,
                "cache": {"batches": 2, "uses": 3, "threshold": 0.1},
                "early_stopping": {"patience": 1, "metric": "f1"},
            },
            task=BINARY | {"threshold": {"rule": "f1"}},
            model={"encoder": MLP, "combine": "max", "precision": "bfloat16"},
        ),
        TABLE,
    ),
    "a regression with defences, so many bytes": (
        made(
            3,
            split(nopeek=0.1, dcor=0.1, max_bytes=6_000),
            task={"kind": "regression", "loss": {"kind": "quantile", "q": 0.7}},
            model={"encoder": {"kind": "tabular"}, "precision": "bfloat16"},
        )
        | {"wire": [{"codec": "randtopk", "keep": 3, "alpha": 0.2, "direction": "up"}]},
        cases.columns("sklearn:diabetes", 3, limit=120),
    ),
    "without a party that is late, the weights of averages in few bits": (
        made(
            2,
            {
                "kind": "fedhssl",
                "ssl": "simsiam",
                "predictor": 8,
                "aggregate": True,
                "rounds": 2,
                "batch_size": 24,
            },
            split(late_policy="skip", deadline_s=60.0, party_dropout=0.4),
            model={"encoder": MLP, "combine": "sum"},
        )
        | {
            "wire": [
                {
                    "codec": "bits",
                    "bits": 8,
                    "error_feedback": True,
                    "exchange": "weights",
                    "direction": "up",
                },
                {"codec": "topk", "keep": 0.5, "values": "float16", "exchange": "embedding"},
            ]
        },
        cases.digits(2),
    ),
    "attention, a top model of one's own, other rows' numbers in a row": (
        made(
            3,
            split(late_policy="skip", deadline_s=60.0, subsets=True, augment={"corruption": 0.2}),
            task=BINARY,
            model={"encoder": RATED, "combine": "attention", "top": TOP},
        ),
        TABLE,
    ),
    "views of images in parts of batches": (
        made(
            2,
            split(
                in_flight=2,
                micro_batches=2,
                augment={"crop_scale": [0.5, 1.0], "flip": 0.5, "jitter": 0.5, "blur": 0.2},
            ),
            model={"encoder": CNN | {"batch_norm": False}},
        ),
        cases.digits(2),
    ),
    "warm-up and steps of each party, embeddings of different widths, a fold": (
        sized(
            made(
                4,
                split(
                    epochs=4,
                    optimizer={
                        "kind": "adamw",
                        "weight_decay": 0.1,
                        "schedule": "step",
                        "step_epochs": 1,
                        "factor": 0.5,
                        "warmup_epochs": 1,
                    },
                    optimizers={"p1": {"kind": "sgd", "lr": 0.05}},
                    in_flight=2,
                    max_bytes=40_000,
                ),
                rows={"split": "stratified", "test": 0.2, "folds": 5, "fold": 5},
            ),
            {"p0": 3, "p2": 5},
        ),
        cases.digits(4),
    ),
    "plateaus, contrastive learning of widths of one's own before": (
        sized(
            made(
                2,
                {
                    "kind": "contrastive",
                    "ssl": "simclr",
                    "optimizers": {"p1": {"kind": "adamw", "lr": 0.01, "warmup_epochs": 1}},
                    **{k: v for k, v in SSL.items() if k != "queue"},
                },
                split(
                    epochs=6,
                    optimizer={"lr": 0.1, "schedule": "plateau", "plateau_patience": 1},
                    early_stopping={"patience": 3},
                ),
            ),
            {"p1": 3},
        ),
        cases.digits(2),
    ),
    "a head on representations of different widths": (
        sized(
            made(
                3,
                {
                    "kind": "fedonce",
                    "epochs": 3,
                    "batch_size": 24,
                    "optimizers": {"p2": {"kind": "sgd", "lr": 0.05, "clip_norm": 1.0}},
                },
                {
                    "kind": "head",
                    "epochs": 3,
                    "batch_size": 24,
                    "optimizer": {"schedule": "step", "step_epochs": 2, "warmup_epochs": 1},
                },
                task=BINARY,
            ),
            {"p1": 4, "p2": 2},
        ),
        TABLE,
    ),
    "FedCVT": (
        made(
            2,
            {"kind": "fedcvt", "epochs": 2, "batch_size": 16} | dict.fromkeys(FEW, 8),
            rows={"aligned": 0.6, "labelled": 40},
        ),
        cases.digits(2),
    ),
}
# What is in no case above, and why it need not be.
ELSEWHERE = {
    "iso": "its noise has a key of its own at each party, so no two runs are alike",
    "mid": "likewise",
    "label_epsilon": "a party draws noise on labels from a secret; see test_label_free.py",
    "kind = resnet18": "eleven million weights; its layers are those of cnn",
    **{
        f"kind = {kind}": "likewise: test_models.py and test_halves.py train each for a step"
        for kind in ("cnn0", "cnn1", "resnet50", "mobilenet_v2", "vgg13")
    },
    "kind = raw": "test_fedonce.py",
    "kind = student": "test_student.py",
    "kind = identity": "the codec of all cases that name none",
    "kind = multilabel": "needs a table of one's own: see test_task.py",
    "kind = survival": "likewise",
    "kind = ranking": "likewise",
}


def lines(path: Path) -> list[tuple[Any, ...]]:
    """A party's notes, without times and bytes of its sessions."""
    notes = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        (note["phase"], note["round"], note["steps"], note["metrics"], note.get("note"))
        for note in notes
    ]


@pytest.mark.parametrize("case", list(CASES))
def test_one_process_computes_what_many_compute(case: str, tmp_path: Path) -> None:
    tables, data = CASES[case]
    before = torch.get_rng_state(), torch.get_num_threads()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine.py").write_text(MINE)
    ours = in_process(tmp_path / "ours" / "run", tables, data, modules=tmp_path / "theirs")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    with Federation(
        tmp_path / "theirs", tables, data, {name: {"allow_code": ["mine"]} for name in data}
    ) as federation:
        federation.start_all()
        theirs = Summary.model_validate(federation.finish())
        assert ours.metrics == theirs.metrics
        assert ours.worth == theirs.worth
        assert ours.steps == theirs.steps
        assert ours.bytes.agrees
        names = federation.names
        for name in names:
            got, want = parameters(tmp_path / "ours" / "run" / name), federation.parameters(name)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) for key in want), name
            assert lines(tmp_path / "ours" / "run" / name) == lines(federation.run_folder / name)
            of_columns = [
                folder / name / "importance.json"
                for folder in (tmp_path / "ours" / "run", federation.run_folder)
            ]
            assert of_columns[0].exists() == of_columns[1].exists()
            if of_columns[0].exists():
                assert of_columns[0].read_text() == of_columns[1].read_text()
        for name in names:
            counted = [
                {
                    (entry.peer, entry.phase, entry.kind, entry.direction): (
                        entry.payload_bytes,
                        entry.message_bytes,
                    )
                    for entry in read_entries(folder / name / "ledger.json")
                    if entry.phase != "control"
                }
                for folder in (tmp_path / "ours" / "run", federation.run_folder)
            ]
            assert counted[0] == counted[1]


def said(table: Any) -> set[str]:
    """All ``key = value`` in the tables of a recipe, however deep."""
    if isinstance(table, list):
        return set().union(*map(said, table))
    if not isinstance(table, dict):
        return set()
    words = {
        f"{key} = {value}" for key, value in table.items() if not isinstance(value, dict | list)
    }
    return words.union(*map(said, table.values())) | {
        f"{key} = …" for key, value in table.items() if value is not None
    }


def possible(section: type[Section]) -> set[str]:
    """Each setting of a section, and each value of those that have few but for the default."""
    found = set()
    for key, each in section.model_fields.items():
        values = get_args(each.annotation) if get_origin(each.annotation) is Literal else ()
        found |= {f"{key} = {value}" for value in values if value != each.default} or {f"{key} = …"}
    return found


def test_every_setting_that_a_run_has_is_in_a_case() -> None:
    """A new setting gets its case, so that one process computes with it what many compute."""
    sections: list[type[Section]] = [
        SplitNNSettings,
        CacheSettings,
        EarlyStopping,
        OptimizerSettings,
        ModelSettings,
    ]
    sections += [TopSettings, CustomTop, BitsSettings, TopKSettings]
    sections += [TaskSettings, FocalSettings, QuantileSettings, ThresholdRule]
    wanted = set().union(*map(possible, sections))
    wanted |= {f"kind = {kind}" for kind in (*list_kinds(), *ENCODERS)}
    wanted |= {f"codec = {name}" for name in codecs.REGISTRY.names() if name != "identity"}
    missing = (
        wanted - set().union(*(said(tables) for tables, _ in CASES.values())) - ELSEWHERE.keys()
    )
    assert sorted(each for each in missing if each.partition(" ")[0] not in ELSEWHERE) == []


class Failing(torch.nn.Module):
    """An encoder of a user's own that fails on its third batch."""

    def __init__(self, spec: InputSpec, width: int) -> None:
        super().__init__()
        self.layer, self.calls = (
            torch.nn.Linear(spec.width if hasattr(spec, "width") else 64, width),
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("the third batch")
        out: Tensor = self.layer(x.flatten(1))
        return out


def test_a_wrong_column_is_one_error_before_anything_runs(tmp_path: Path) -> None:
    tables, data = CASES["SS-VFL, a stratified split"]
    wrong = data | {"p1": data["p1"] | {"source": str(tmp_path / "none.csv")}}
    with raises(InputError, Code.FILE_INVALID, names=("none.csv", "data.source")):
        in_process(tmp_path / "run", tables, wrong)
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if t.name in data]


def test_somebody_who_stops_a_run_leaves_no_thread_behind(tmp_path: Path) -> None:
    tables, data = CASES["split training with dropout"]

    def stop(*_round: Any) -> None:
        # As Ctrl-C.
        _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        in_process(tmp_path / "run", tables, data, observe=stop)
    assert not [thread for thread in threading.enumerate() if thread.name in data]


def test_a_run_says_what_its_time_was_for(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "breast-cancer.toml"
    tables = read_toml(path)
    train = {key: value for key, value in tables["phases"][0].items() if key != "early_stopping"}
    tables["phases"][0] = train | {"epochs": 2}
    recipe = Recipe.model_validate(tables)
    summary = run_in_process(recipe, divide(recipe, path.parent), tmp_path / "run")
    parties = [party for party in summary.parties if party.role != "server"]
    assert parties
    for party in parties:
        by_phase = {each.phase: each for each in party.times}
        assert list(by_phase) == [phase.name for phase in recipe.phases]
        times = by_phase[recipe.phases[0].name]
        assert times.steps > 0
        assert min(times.encode_s, times.wait_s, times.decode_s, times.compute_s) > 0
        whole_s = sum(
            each.encode_s + each.wait_s + each.decode_s + each.compute_s for each in party.times
        )
        assert whole_s <= party.wall_s + 0.01
        assert times.cpu_s == pytest.approx(
            times.encode_s + times.decode_s + times.compute_s, abs=1e-5
        )
    took_s = [sum(each.cpu_s for each in party.times) for party in parties]
    # They take turns.
    assert sum(took_s) <= max(party.wall_s for party in parties) + 0.01


def test_a_run_from_mapped_files_ends_with_the_same_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = cases.recipe(2, task={"kind": "binary"}, phase={"epochs": 2}, rows={"split": "column"})
    recipe["phases"].append({"kind": "evaluate"})
    own, other = tmp_path / "own.parquet", tmp_path / "other.csv"
    table = frame().filter(pc.is_valid(frame()["id"]))
    parquet.write_table(table, own)
    arrow_csv.write_csv(table.select(["id", "a", "town"]), other)
    shared = {"id": "id", "missing": "mean", "duplicates": "first"}
    found = []
    for memory in (256, 0):
        more = {**shared, "memory_mib": memory, "scratch": str(tmp_path)}
        data = {
            "p0": vfl.Data(str(own), label="y", settings={**more, "split": "part"}),
            "p1": vfl.Data(str(other), settings=more),
        }
        found.append(vfl.simulate(recipe, data, out=tmp_path / str(memory), quiet=True))
        small_blocks(monkeypatch)
    for party in ("p0", "p1"):
        one, two = (run.model(party) for run in found)
        for left, right in ((one.encoder, two.encoder), (one.top, two.top)):
            assert (left is None) == (right is None)
            if left is not None and right is not None:
                assert list(left.state_dict()) == list(right.state_dict())
                same_weights = zip(
                    left.state_dict().values(), right.state_dict().values(), strict=True
                )
                assert all(torch.equal(*pair) for pair in same_weights)
    assert found[0].metrics == found[1].metrics


def test_few_rows_are_learnt_as_well_as_by_another_program(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, embedding=64)
    x, y = (
        torch.tensor(load_digits().data / 16, dtype=torch.float32),
        torch.tensor(load_digits().target),
    )
    train, test = slice(0, 540), slice(540, 1140)
    steps, _ = probe._head.train(known(x[train]), y[train])
    assert steps == 4000
    with torch.no_grad():
        found = (probe._party.outputs(x[test]).argmax(1) == y[test]).float().mean().item()
    want = LogisticRegression(max_iter=1000).fit(x[train], y[train]).score(x[test], y[test])
    assert found > want - 0.03
