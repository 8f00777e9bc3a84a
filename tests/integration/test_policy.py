"""A policy in words: what it refuses, with which key and reason, and that nothing leaves before."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.aligning import Direct
from tests.harness.errors import assert_names, raises
from tests.harness.federation import Federation, reason_to_wait, refused
from tests.harness.memory import in_memory, in_process
from tests.integration import test_resume
from vfl_common.bundle import CONTROL, Kind, Ledger, StepKey
from vfl_common.config.policy import LEVELS, PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.messages import MAX_SHOWN_BYTES
from vfl_party.align import rounds
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.outbound.declared import Exchange, Sent, Use, f32, u8
from vfl_party.outbound.filter import Filter, OutboundBundle
from vfl_party.outbound.policies import TablePolicy
from vfl_party.policy.guards import WordsGuard, digest_of, digests
from vfl_party.policy.meeting import SHOWN, check_tables, render_guards
from vfl_party.record.lines import ALL

NOISE = [
    {"kind": "gaussian", "exchange": exchange, "sent_by": "passive", "sigma": 0.5}
    for exchange in ("embedding", "validation", "prediction")
]
SPLIT: dict[str, Any] = {"kind": "splitnn", "epochs": 2, "batch_size": 20}
TREES: dict[str, Any] = {"kind": "secureboost", "trees": 1, "bins": 4, "depth": 2}
RECIPES: dict[str, list[dict[str, Any]]] = {
    "splitnn": [SPLIT],
    "noise": [SPLIT | {"transforms": NOISE}],
    "bits": [SPLIT | {"codec": "float16"}],
    "fedonce": [
        {"kind": "fedonce", "epochs": 1, "batch_size": 20},
        {"kind": "head", "own_encoder": "trained", "epochs": 1, "batch_size": 20},
    ],
    "trees": [TREES | {"encryption": "none"}],
}
DEMAND = {"kind": "embedding", "transform": "gaussian", "at_least": {"sigma": 0.4}}
# {policy: (whose, its table, {recipe: the key that refuses it})}; the others are allowed.
POLICIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "open": ("p1", {"level": "open"}, {}),
    "careful": ("p1", {"level": "careful"}, {}),
    "strict": ("p0", {"level": "strict"}, dict.fromkeys(RECIPES, "recipes|encrypted")),
    "sealed": (
        "p0",
        {"level": "open", "encrypted": ["gradient"]},
        dict.fromkeys(("splitnn", "noise", "bits", "trees"), "encrypted"),
    ),
    "phases": (
        "p1",
        {"level": "open", "phases": ["fedonce", "head", "secureboost"]},
        dict.fromkeys(("splitnn", "noise", "bits"), "phases"),
    ),
    "kinds": (
        "p0",
        {"level": "open", "kinds": ["embedding", "rows", "verdict"]},
        dict.fromkeys(("splitnn", "noise", "bits", "trees"), "kinds"),
    ),
    "demands": (
        "p1",
        {"level": "open", "demands": [DEMAND]},
        dict.fromkeys(("splitnn", "bits", "fedonce"), "demands"),
    ),
    "stronger": (
        "p1",
        {"level": "open", "demands": [DEMAND | {"at_least": {"sigma": 0.6}}]},
        dict.fromkeys(("splitnn", "bits", "fedonce", "noise"), "demands"),
    ),
    "epochs": (
        "p1",
        {"level": "open", "most_epochs": 1},
        dict.fromkeys(("splitnn", "noise", "bits"), "most_epochs"),
    ),
    "numbers": (
        "p1",
        {"level": "open", "most_numbers": 12},
        dict.fromkeys(("splitnn", "noise", "bits"), "most_numbers"),
    ),
    "bytes": (
        "p1",
        {"level": "open", "most_bytes": 2_600},
        dict.fromkeys(("splitnn", "noise"), "most_bytes"),
    ),
    "rows": (
        "p1",
        {"level": "open", "least_rows": 9},
        dict.fromkeys(("splitnn", "noise", "bits"), "least_rows"),
    ),
}


def recipe(phases: list[dict[str, Any]], policies: dict[str, Any] | None = None) -> dict[str, Any]:
    task = {"kind": "binary"} if phases[0]["kind"] == "secureboost" else None
    made = cases.recipe(2, task=task) | {"phases": phases}
    return made | {"simulate": {"policies": policies or {}}}


def data(phases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if phases[0]["kind"] == "secureboost":
        return cases.columns("sklearn:breast_cancer", 2, limit=60)
    return cases.digits(2, limit=60)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(phase, kind) of every frame that a process or a party counts as sent."""
    found: list[tuple[str, str]] = []
    add = Ledger.add

    def noted(self: Ledger, peer: str, phase: str, kind: str, direction: Any, *of: Any) -> None:
        if phase != CONTROL and direction == "sent":
            found.append((phase, kind))
        add(self, peer, phase, kind, direction, *of)

    monkeypatch.setattr(Ledger, "add", noted)
    return found


CASES = [(name, policy) for policy in POLICIES for name in RECIPES]


@pytest.mark.parametrize(("name", "policy"), CASES, ids=["-".join(each) for each in CASES])
def test_a_policy_refuses_or_allows(
    name: str, policy: str, tmp_path: Path, frames: list[tuple[str, str]]
) -> None:
    who, words, refuses = POLICIES[policy]
    phases = RECIPES[name]
    tables = recipe(phases, {who: words})
    if name not in refuses:
        in_process(tmp_path / "run", tables, data(phases))
        assert frames
        return
    with raises(InputError, Code.REFUSED) as caught:
        in_process(tmp_path / "run", tables, data(phases))
    assert any(f"policy.{key}" in str(caught.value) for key in refuses[name].split("|"))
    assert frames == []


def test_a_demand_that_a_prediction_would_not_meet_is_refused_before_training(
    tmp_path: Path, frames: list[tuple[str, str]]
) -> None:
    phases = [SPLIT | {"transforms": NOISE[:2]}]
    tables = recipe(phases, {"p1": {"level": "open", "demands": [DEMAND]}})
    with raises(InputError, Code.REFUSED, names="policy.demands"):
        in_process(tmp_path / "run", tables, data(phases))
    assert frames == []


def test_what_leaves_is_counted_by_person_and_refused_at_the_way_out(
    tmp_path: Path, frames: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan, which a run with too many steps has not, each person's numbers count."""
    monkeypatch.setattr("vfl_party.policy.meeting.MAX_STEPS", 1)
    phases = [SPLIT | {"epochs": 3}]
    # Three epochs of eight numbers; the third one is too much.
    for most, fine in ((24, True), (23, False)):
        frames.clear()
        tables = recipe(phases, {"p1": {"level": "open", "most_numbers": most}})
        if fine:
            in_process(tmp_path / "run", tables, data(phases))
            continue
        with raises(InputError, Code.REFUSED, names=("policy.most_numbers", "p0")):
            in_process(tmp_path / "refused", tables, data(phases))
        # The first batch of the third epoch is held back.
        assert frames.count(("splitnn", "embedding")) < 2 * (3 + 1) * 2


@pytest.mark.parametrize("words", [{"most_epochs": 1}, {"peers": [f"sha256:{'0' * 64}"]}])
def test_over_grpc_a_run_is_refused_before_anything_is_sent(
    words: dict[str, Any], tmp_path: Path
) -> None:
    tables = cases.recipe(2) | {"phases": [SPLIT]}
    extra = {"p1": {"policy": {"level": "open"} | words}}
    with Federation(tmp_path, tables, data([SPLIT]), extra) as federation:
        federation.start_server()
        said = refused(federation.start_party("p1"), f"policy.{next(iter(words))}")
        assert "in the party file" in said
        # The others read that it refuses, and not what.
        federation.start_party("p0")
        why = reason_to_wait(federation.programs["p0"], "p1")
        assert "policy" in why
        assert "most_epochs" not in why
        assert not list((tmp_path / "runs").glob("*/p1"))


def test_all_parties_read_the_policies_of_all_before_anything_is_sent(tmp_path: Path) -> None:
    tables = cases.recipe(2) | {"phases": [SPLIT]}
    extra = {"p1": {"policy": {"level": "careful", "most_epochs": 5}}}
    with Federation(tmp_path, tables, data([SPLIT]), extra) as federation:
        federation.start_all()
        federation.finish()
        for name in ("p0", "p1"):
            shown = json.loads((federation.run_folder / name / SHOWN).read_text())
            assert shown["p0"]["policy"] == {"plugin": "allow_all"}
            assert shown["p1"]["policy"]["most_epochs"] == 5
            assert shown["p1"]["policy"]["level"] == "careful"
        # A party file without a policy says what that means.
        said = [
            each["said"] for each in federation.programs["p0"].seen() if each["event"] == "policy"
        ]
        assert len(said) == 1
        assert_names(said[0], "careful")
        assert not any(each["event"] == "policy" for each in federation.programs["p1"].seen())


class Limited(Federation):
    """p2 lets out as many numbers about a person as four epochs need."""

    def write_party(self, name: str) -> Path:
        words = {"level": "open", "most_numbers": 4 * test_resume.WIDTH}
        policy = {"policy": words} if name == "p2" else {}
        self.extra[name] = self.extra.get(name, {}) | policy
        return super().write_party(name)


def test_a_run_that_is_killed_goes_on_counting_and_ends_as_undisturbed(tmp_path: Path) -> None:
    undisturbed = in_memory(tmp_path / "undisturbed", test_resume.recipe(), test_resume.DATA)
    with test_resume.held(
        tmp_path / "killed",
        test_resume.recipe(),
        test_resume.DATA,
        Limited,
        sent=test_resume.SECOND_EPOCH,
    ) as (federation, proxy):
        federation.wait_for_checkpoint(test_resume.AFTER_FIRST)
        test_resume.kill(federation, proxy, "p2")
        assert federation.finish()["interruptions"] == 1
        test_resume.assert_equal(test_resume.parameters(federation), undisturbed)
        store = CheckpointStore(federation.run_folder / "p2" / "checkpoints", 2)
        chains = store.load(store.labels()[-1])["job"]["chains"]
        (found,) = (
            each["policy"]
            for of in chains.values()
            for way in of
            for each in way
            if each is not None and "policy" in each
        )
        # What the second epoch repeats is counted once.
        assert int(found["numbers"]["p0"].max()) == 4 * test_resume.WIDTH


def test_ciphertexts_may_leave_where_gradients_may_not() -> None:
    policy = TablePolicy(PolicySettings(level="open", encrypted=("gradient",)))
    exchange = Exchange("gradients", Sent(Kind.GRADIENT, {"ciphertexts": u8("rows", 4)}))
    policy("a", exchange, exchange.up)
    exchange = Exchange("gradients", Sent(Kind.GRADIENT, {"z": f32("rows", 4)}))
    with raises(InputError, Code.REFUSED, names="policy.encrypted"):
        policy("a", exchange, exchange.up)


def test_a_transform_that_leaves_a_tensor_as_it_is_meets_no_demand() -> None:
    demands = ({"kind": "weights", "transform": "iso"},)
    policy = TablePolicy(PolicySettings.model_validate({"level": "open", "demands": demands}))
    tensors, noisy = {"weight": f32(4), "running_mean": f32(2)}, {"amplifier": 1.0}
    for leave in ((), ("running_var",)):
        whole = Sent(Kind.WEIGHTS, tensors, (Use("iso", noisy, leave=frozenset(leave)),))
        policy("a", Exchange("weights", whole), whole)
    part = Sent(Kind.WEIGHTS, tensors, (Use("iso", noisy, leave=frozenset({"running_mean"})),))
    with raises(InputError, Code.REFUSED, names=("policy.demands", "running_mean")):
        policy("a", Exchange("weights", part), part)


def test_counts_survive_a_checkpoint() -> None:
    sent = Sent(Kind.EMBEDDING, {"z": f32("rows", 4)})
    exchange = Exchange("embedding", sent)
    leaving = OutboundBundle(StepKey("a", 0, 0), "embedding", ("p0",), 12, 48, [0, 1, 2], 3)

    def made(most: int) -> Filter:
        return TablePolicy(PolicySettings(level="open", most_numbers=most))("a", exchange, sent)

    first = made(8)
    first.leaves(leaving)
    second = made(8)
    second.load_state(first.state() or {})
    second.leaves(leaving)
    third = made(8)
    third.load_state(second.state() or {})
    with raises(InputError, Code.REFUSED, names=("policy.most_numbers", "p0")):
        third.leaves(leaving)


def test_bytes_that_find_the_rows_in_common_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan, which counts them before."""
    monkeypatch.setattr("vfl_party.policy.meeting.MAX_STEPS", 1)
    sent = Counter[str]()
    add = Ledger.add

    def noted(
        self: Ledger, peer: str, phase: str, kind: str, direction: Any, payload: int, *of: Any
    ) -> None:
        if peer == "p0" and direction == "sent" and phase != CONTROL:
            sent[phase] += payload
        add(self, peer, phase, kind, direction, payload, *of)

    monkeypatch.setattr(Ledger, "add", noted)
    phases = [SPLIT]
    in_process(tmp_path / "run", recipe(phases), data(phases))
    monkeypatch.setattr(Ledger, "add", add)
    assert sent["open"]
    for less in (0, 1):
        words = {"level": "open", "most_bytes": sum(sent.values()) - less}
        tables = recipe(phases, {"p1": words})
        if not less:
            in_process(tmp_path / "fine", tables, data(phases))
            continue
        with raises(InputError, Code.REFUSED, names=("policy.most_bytes", "495")):
            in_process(tmp_path / "refused", tables, data(phases))


@pytest.mark.parametrize(
    "demand",
    [
        {"transform": "gausian"},
        {"transform": "gaussian", "at_least": {"sigmaa": 1.0}},
        {"transform": "max_norm", "at_most": {"sigma": 1.0}},
    ],
)
def test_a_demand_of_what_there_is_not_is_named(demand: dict[str, Any]) -> None:
    words = {"level": "open", "demands": [{"kind": "embedding"} | demand]}
    with raises(InputError, Code.CONFIG_INVALID, names="policy.demands"):
        TablePolicy(PolicySettings.model_validate(words))


def test_careful_lets_a_run_be_as_it_would_be(tmp_path: Path) -> None:
    phases = [SPLIT]
    plain = in_memory(tmp_path / "plain", recipe(phases), data(phases))
    words = {name: {"level": "careful"} for name in ("p0", "p1")}
    held = in_memory(tmp_path / "held", recipe(phases, words), data(phases))
    for name, models in plain.items():
        for key, value in models.items():
            assert value.equal(held[name][key])


def test_each_level_refuses_what_the_one_before_it_refuses() -> None:
    careful, strict = LEVELS["careful"], LEVELS["strict"]
    assert careful.keys() <= strict.keys()
    for key in ("most_epochs", "most_numbers", "most_bytes"):
        assert strict[key] < careful[key]
    assert LEVELS["open"] == {}


def test_a_plug_in_is_known_by_what_its_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy_mine.py").write_text("CODEC = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "policy_mine:CODEC", "vfl.codecs")
    monkeypatch.setattr("vfl_party.policy.guards.entry_points", lambda **_: [entry])
    ((name, digest),) = digests(["vfl.codecs:mine"])
    assert name == "vfl.codecs:mine"
    (tmp_path / "policy_mine.py").write_text("CODEC = 2\n")
    ((_, changed),) = digests(["vfl.codecs:mine"])
    assert digest != changed
    # Not for want of a file.
    assert "unknown" not in changed
    check = WordsGuard._check_plugins
    check((f"{name} = {changed}",), [name])
    check((name,), [name])
    for allowed in ((), (f"{name} = {digest}",)):
        with raises(InputError, Code.REFUSED, names=("policy.plugins", "vfl.codecs")):
            check(allowed, [name])


@pytest.mark.parametrize("shared", ["", "policy_space."])
def test_a_plug_in_in_a_package_is_known_by_all_its_files(
    shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / shared.replace(".", "/") / "policy_package"
    names = ("__init__.py", "codecs/__init__.py", "codecs/mine.py", "numbers.bin", "__main__.py")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("raise SystemExit(1)\n" if name == "__init__.py" else "")
    monkeypatch.syspath_prepend(tmp_path)
    module = f"{shared}policy_package.codecs.mine"
    found = {digest_of(module)}
    for name in names:
        (root / name).write_text("2\n")
        found.add(digest_of(module))
    (root / "codecs" / "mine.py").rename(root / "codecs" / "other.py")
    found.add(digest_of(module))
    assert len(found) == len(names) + 2
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "x.pyc").write_text("")
    # Of others in the same namespace, nothing.
    (root.parent / "others.py").write_text("")
    assert digest_of(module) in found
    assert not any("unknown" in each for each in found)


def test_epochs_are_counted_where_they_have_several_rounds(tmp_path: Path) -> None:
    phases = [SPLIT | {"checkpoint_steps": 1}]
    tables = recipe(phases, {"p1": {"level": "open", "most_epochs": 2}})
    assert in_process(tmp_path / "run", tables, data(phases)).metrics
    tables = recipe(phases, {"p1": {"level": "open", "most_epochs": 1}})
    with raises(InputError, Code.REFUSED, names="policy.most_epochs"):
        in_process(tmp_path / "refused", tables, data(phases))


# Can be read, but not written as this program writes it.
TOO_DEEP = f'{{"x": {"[" * 600}1e999{"]" * 600}}}'


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 40_000, f'"{"x" * MAX_SHOWN_BYTES}"', TOO_DEEP])
def test_what_a_peer_shows_is_a_table(text: str) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        check_tables([], "run", {"p0": "", "p1": text})


def test_a_server_that_changes_a_policy_on_its_way_is_found() -> None:
    made = Recipe.model_validate(cases.recipe(2))
    guard = WordsGuard(PolicySettings(level="strict"), "p1", made, {})
    text = render_guards([guard])
    assert check_tables([guard], "run", {"p0": "", "p1": text})["p1"]["policy"]["level"] == "strict"
    # One of the release before passes nothing on.
    for changed in ({}, {"p1": ""}, {"p1": text.replace("strict", "open")}):
        with raises(PeerError, Code.MALFORMED_MESSAGE):
            check_tables([guard], "run", changed)


def test_limits_of_who_is_told_later_how_many_rows_there_are_hold_at_the_way_out(
    tmp_path: Path, frames: list[tuple[str, str]]
) -> None:
    """The active party of parties with rows of their own has no plan before they are there."""
    moco = cases.own_rows_recipe(2, epochs=1)
    for most, fine in ((10_000_000, True), (100, False)):
        frames.clear()
        policies = {"policies": {"p0": {"level": "open", "most_bytes": most}}}
        run = tmp_path / str(most)
        if fine:
            in_process(run, moco | {"simulate": policies}, cases.own_rows(2))
            continue
        with raises(InputError, Code.REFUSED, names=("policy.most_bytes", "100")):
            in_process(run, moco | {"simulate": policies}, cases.own_rows(2))
        assert ("mocosfl", "gradient") not in frames


FEDONCE_PCA: dict[str, Any] = {"kind": "fedonce", "objective": "pca"}
HEAD: dict[str, Any] = {"kind": "head", "own_encoder": "trained", "batch_size": 20}
# Three batches of the 48 training rows are an epoch; what a case says is two epochs, but for pca.
EPOCHS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "splitnn": (2, [{"kind": "splitnn", "steps": 6, "batch_size": 20, "checkpoint_steps": 1}]),
    "student": (2, [SPLIT | {"epochs": 1}, {"kind": "student", "steps": 6, "batch_size": 20}]),
    "head": (2, [FEDONCE_PCA, HEAD | {"steps": 6}]),
    "pca": (1, [FEDONCE_PCA, HEAD | {"epochs": 1}]),
}


@pytest.mark.parametrize("name", list(EPOCHS))
@pytest.mark.parametrize("who", ["p0", "p1"])
def test_steps_count_as_the_epochs_that_they_make(who: str, name: str, tmp_path: Path) -> None:
    epochs, phases = EPOCHS[name]
    for level in ("careful", "open"):
        tables = recipe(phases, {who: {"level": level, "most_epochs": epochs}})
        assert in_process(tmp_path / level, tables, data(phases)).metrics
    if epochs == 1:
        return
    tables = recipe(phases, {who: {"level": "open", "most_epochs": epochs - 1}})
    with raises(InputError, Code.REFUSED, names="policy.most_epochs"):
        in_process(tmp_path / "refused", tables, data(phases))


def test_epochs_follow_from_the_rows_that_are_in_common(
    tmp_path: Path, frames: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps are two epochs of 60 rows, and six epochs of the ten rows that both have."""
    monkeypatch.setattr(rounds, "Masking", Direct)
    tables = recipe([{"kind": "splitnn", "steps": 6, "batch_size": 20}])
    tables |= {"task": {"kind": "binary"}, "rows": {"align": "psi", "test": 0.0}}
    files: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(("p0", "p1")):
        lines = [f"c{row:03d},{row % 7},{row % 2}" for row in range(50 * place, 50 * place + 60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,a,y", *lines]))
        label = {"label": "y"} if not place else {"drop": ["y"]}
        files[name] = {"source": str(tmp_path / f"{name}.csv"), "id": "id", **label}
    for most, fine in ((6, True), (5, False)):
        frames.clear()
        policies = {"policies": {"p1": {"level": "open", "most_epochs": most}}}
        if fine:
            in_process(tmp_path / "fine", tables | {"simulate": policies}, files)
            continue
        with raises(InputError, Code.REFUSED, names="policy.most_epochs"):
            in_process(tmp_path / "refused", tables | {"simulate": policies}, files)
        assert ("splitnn", "embedding") not in frames


# How a batch of twenty rows is exchanged: {name: (keys of the phase, rows of its smallest message)}.
PIPED: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 14),
    "in flight": ({"in_flight": 3}, 14),
    "local updates": ({"local_updates": 2}, 14),
    "cache": ({"cache": {"batches": 2, "uses": 1}}, 14),
    "parts": ({"micro_batches": 2}, 7),
}


@pytest.mark.parametrize("name", list(PIPED))
@pytest.mark.parametrize("counted_before", [True, False])
def test_min_rows_and_max_numbers_hold_however_batches_are_exchanged(
    counted_before: bool,
    name: str,
    tmp_path: Path,
    frames: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each limit lets a run go to its end that meets it exactly, and stops one that is beyond it."""
    if not counted_before:
        monkeypatch.setattr("vfl_party.policy.meeting.MAX_STEPS", 1)
    keys, smallest = PIPED[name]
    phases = [SPLIT | keys]
    # Two epochs of eight numbers.
    for key, limit, beyond in (("least_rows", smallest, 1), ("most_numbers", 16, -1)):
        for words in ({key: limit}, {key: limit + beyond}):
            frames.clear()
            tables = recipe(phases, {"p1": {"level": "open"} | words})
            tables["rows"] = {"validation": 0.0, "test": 0.1}
            if words[key] == limit:
                in_process(tmp_path / key, tables, data(phases))
                assert frames
                continue
            with raises(InputError, Code.REFUSED):
                in_process(tmp_path / f"{key}-refused", tables, data(phases))
            assert counted_before == (frames == [])


def test_min_rows_holds_for_a_method_that_does_not_say_its_rows() -> None:
    sent = Sent(Kind.EMBEDDING, {"z": f32("rows", 4)})
    for limit, fine in ((3, True), (4, False)):
        policy = TablePolicy(PolicySettings(level="open", least_rows=limit))
        held = policy("a", Exchange("embedding", sent), sent)
        leaving = OutboundBundle(StepKey("a", 0, 0), "embedding", ("p0",), 12, 48, ALL, 3)
        if fine:
            held.leaves(leaving)
            continue
        with raises(InputError, Code.REFUSED, names="policy.least_rows"):
            held.leaves(leaving)
