"""``vfl-party serve``: the numbers of a prediction, by id, from programs that come and go."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import grpc
import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from tests.harness.online import numbers, predicted, store_of
from tests.harness.present import present
from tests.harness.served import NAMES, ROWS, Served, trained
from tests.harness.waiting import wait_until
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.process.logs import version
from vfl_common.rpc.serving.stream import EMBEDDED, ServingAnswer
from vfl_common.summary import Worth
from vfl_party.assembly.files import read_files
from vfl_party.phases.stand_in import read_means
from vfl_party.predict.run import Quality, load_joint
from vfl_serve.kinds import AloneScorer
from vfl_serve.run import ACCESS, LOG
from vfl_serve.scorer import OnlineScorer
from vfl_serve.store import FeatureLookup
from vfl_serve.telling import OWN, PARTIES, QUEUE, TOP, RequestTrace, record_stages

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from vfl_serve.http.v1 import make_rows


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with trained(tmp_path_factory.mktemp("serve")) as found:
        found.start_all(grpc="127.0.0.1:0")
        yield found


@pytest.fixture(scope="module")
def want(served: Served) -> dict[str, Any]:
    """What a joint prediction gives, {id: (score, class)}."""
    found = served.run.predict()
    return dict(zip(found["id"], zip(found["score_1"], found["class"], strict=True), strict=True))


def scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["id"]: (row["score_1"], row["class"]) for row in rows}


def test_numbers_are_those_of_a_prediction_bit_for_bit(
    served: Served, want: dict[str, Any]
) -> None:
    ids = list(want)
    rows = served.rows(*ids)
    assert scores(rows) == want
    assert {(row["state"], *row["parties"]) for row in rows} == {("scored", *NAMES)}
    assert all(row["missing"] == {} for row in rows)
    whole = next(each.test for each in worth(served).subsets if len(each.parties) == 3)
    assert {row["expected_quality"] for row in rows} == {whole}
    # By itself, and beside others, in any order.
    with ThreadPoolExecutor(8) as callers:
        for each in callers.map(served.rows, ids):
            assert scores(each) == {each[0]["id"]: want[each[0]["id"]]}
        groups = [ids[at::7] for at in range(7)]
        for group, each in zip(groups, callers.map(lambda g: served.rows(*g), groups), strict=True):
            assert scores(each) == {name: want[name] for name in group}


def test_other_protocols_give_the_same(served: Served, want: dict[str, Any]) -> None:
    ids, name = list(want)[:9], served.get("/v2/models/case")["name"]
    score, chosen = zip(*(want[each] for each in ids), strict=True)
    inputs = [{"name": "ids", "shape": [9], "datatype": "BYTES", "data": ids}]
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{served.run.folder.name}"):
        status, answer = served.ask(f"{path}/infer", {"id": "7", "inputs": inputs})
        found = {each["name"]: each["data"] for each in answer["outputs"]}
        assert (status, answer["id"]) == (200, "7")
        assert (found["score_1"], found["class"]) == (list(score), list(chosen))
        assert set(found["parties"]) == {",".join(NAMES)}
        assert served.get(f"{path}/ready")["ready"] is True
    for form in (
        {"dataframe_split": {"columns": ["id"], "data": [[each] for each in ids]}},
        {"dataframe_records": [{"id": each} for each in ids]},
        {"inputs": ids},
        {"inputs": {"id": ids}},
        {"instances": ids},
    ):
        status, answer = served.ask("/invocations", form)
        assert [row["score_1"] for row in answer["predictions"]] == list(score)
    assert served.get("/ping") == {"status": "ok"}
    with urlopen(f"{served.url}/version", timeout=10) as answer:  # noqa: S310 - the test's own
        assert answer.read().decode() == version()
    assert served.get("/v2/health/ready")["ready"] is True


def test_numbers_over_grpc_are_the_same(served: Served, want: dict[str, Any]) -> None:
    ready = next(each for each in served.program("p0").events if each["event"] == "ready")
    ids, frame = list(want), read(served, "p0")
    asked = pb.ModelInferRequest(model_name="case", model_version=served.run.folder.name)
    tensor = asked.inputs.add(name="ids", datatype="BYTES", shape=[len(ids)])
    tensor.contents.bytes_contents.extend(each.encode() for each in ids)
    with grpc.insecure_channel(ready["grpc"]) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def outputs() -> dict[str, Any]:
            answer = pb.ModelInferResponse.FromString(ask(asked.SerializeToString(), timeout=30))
            return {each.name: each.contents for each in answer.outputs}

        plain = outputs()
        for name in frame:
            column = asked.inputs.add(name=name, datatype="FP64", shape=[len(ids)])
            column.contents.fp64_contents.extend(frame[name])
        own = outputs()
    for found in (plain, own):
        rows = zip(found["score_1"].fp64_contents, found["class"].int64_contents, strict=True)
        assert dict(zip(ids, rows, strict=True)) == want
        assert set(found["parties"].bytes_contents) == {",".join(NAMES).encode()}
        assert all(found["present"].bool_contents)


def test_own_columns_take_the_place_of_the_table(served: Served, want: dict[str, Any]) -> None:
    ids, frame = list(want), read(served, "p0")
    columns = {name: frame[name].tolist() for name in frame}
    status, answer = served.ask("/v1/predict", {"ids": ids, "columns": columns})
    assert status == 200, answer
    assert scores(answer["rows"]) == want
    # Somebody new to the active party, whom the others know.
    one = {name: values[3:4] for name, values in columns.items()}
    inputs = [{"name": "ids", "shape": [1], "datatype": "BYTES", "data": ["K-7"]}]
    inputs += [
        {"name": name, "shape": [1], "datatype": "FP64", "data": values}
        for name, values in one.items()
    ]
    status, answer = served.ask("/v2/models/case/infer", {"inputs": inputs})
    found = {each["name"]: each["data"] for each in answer["outputs"]}
    assert found["state"] == ["scored"]
    assert found["score_1"] != [want["K-7"][0]]
    # Whom nobody knows, the student scores.
    (row,) = served.rows("nobody", columns=one)
    assert (row["state"], row["parties"]) == ("partly", ["p0"])
    solo = served.run.predict(solo=True)
    assert row["score_1"] == solo["score_1"][solo["id"].index(ids[3])]
    measured = served.run.metrics["test student"][worth(served).metric]
    assert row["expected_quality"] == measured
    for wrong in (
        {"c0": [1.0]},
        {"c0": [1.0, 2.0], "c1": [1.0, 2.0]},
        {**one, "c0": ["text"]},
        {**one, "label": [1]},
        {**one, "c0": [None]},
        {**one, "c0": [1.0, "a"]},
        {},
    ):
        status, answer = served.ask("/v1/predict", {"ids": ["K-1"], "columns": wrong})
        assert status == 422, (wrong, answer)


def worth(served: Served) -> Worth:
    return present(served.run.summary.worth)


def read(served: Served, name: str) -> Any:
    """Returns a party's columns, in the order of the ids."""
    frame = pd.read_csv(served.federation.data[name]["source"])
    return frame.drop(columns=["id", "label"], errors="ignore")


def test_the_student_is_served_alone(served: Served) -> None:
    """It asks nobody, and opens no port for the others."""
    program = served.federation.start(
        "solo", *("vfl-party", "serve", "p0.toml", "--run", served.run.folder.name, "--student")
    )
    ready = program.wait_for("ready")
    assert ready["address"] == ""
    want = predicted(served.run, solo=True)
    body = {"ids": [*want, "nobody"]}
    status, answer = served.ask("/v1/predict", body, url=ready["http"])
    assert status == 200, answer
    *rows, last = answer["rows"]
    assert scores(rows) == {each: tuple(found.values()) for each, found in want.items()}
    assert {(row["state"], *row["parties"], *row["missing"]) for row in rows} == {("scored", "p0")}
    assert (last["state"], last["missing"]) == ("unknown", {"p0": "unknown id"})
    assert {row["expected_quality"] for row in rows} == {
        served.run.metrics["test student"][worth(served).metric]
    }
    assert served.ask("/healthz", url=ready["http"])[1]["parties"] == ["p0"]
    columns = {name: values.tolist() for name, values in read(served, "p0").items()}
    status, answer = served.ask(
        "/v1/predict", {"ids": [*want], "columns": columns}, url=ready["http"]
    )
    assert scores(answer["rows"]) == scores(rows)
    program.stop()


def test_the_student_alone_may_ask_a_database_by_id(served: Served, tmp_path: Path) -> None:
    path, want = tmp_path / "own.db", predicted(served.run, solo=True)
    with sqlite3.connect(path) as file:
        pd.read_csv(served.federation.data["p0"]["source"]).to_sql("people", file, index=False)
    query = "SELECT id, c0, c1 FROM people WHERE id IN :ids"
    database = {"kind": "database", "source": f"sqlite:///{path}", "query": query}
    store = store_of(served.run.folder, "p0", solo=True, serve={"store": database})
    with sqlite3.connect(path) as file:
        file.execute("UPDATE people SET c0 = 'much' WHERE id = 'K-2'")
    ids = [*want, "nobody"]
    found = AloneScorer(store, 20.0, Quality()).score(ids)
    unfit = ids.index("K-2")
    assert [
        (each, found.state[at]) for at, each in enumerate(ids) if found.state[at] != "scored"
    ] == [("K-2", "failed"), ("nobody", "unknown")]
    assert found.part(unfit).missing == {"p0": "failed"}
    assert found.part(len(want)).missing == {"p0": "unknown id"}
    assert all(numbers(found, at) == want[each] for at, each in enumerate(want) if at != unfit)
    late = AloneScorer(store, 0.0, Quality()).score(ids)
    assert (set(late.state), late.part(0).missing) == ({"failed"}, {"p0": "late"})
    store.close()


def test_who_is_unknown_has_no_score(served: Served) -> None:
    rows = served.rows("K-1", "nobody", "K-2")
    assert [row["state"] for row in rows] == ["scored", "unknown", "scored"]
    assert (rows[1]["score_1"], rows[1]["class"], rows[1]["parties"]) == (None, None, [])
    # There is no score whose quality could be expected.
    assert rows[1]["expected_quality"] is None
    # Only the active party says of itself that it does not know an id.
    others = dict.fromkeys(NAMES[1:], "not answered")
    assert rows[1]["missing"] == {NAMES[0]: "unknown id", **others}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/predict", {}, 422),
        ("/v1/predict", {"ids": []}, 422),
        ("/v1/predict", {"ids": [3]}, 422),
        ("/v1/predict", {"ids": ["a"], "more": 1}, 422),
        ("/v1/predict", {"ids": ["a" * 1001]}, 422),
        ("/v1/predict", {"ids": ["a"] * 10_001}, 413),
        ("/v1/predict", {"ids": ["a"], "min_quality": "high"}, 422),
        ("/v1/predict", b"{", 422),
        ("/v1/predict", b"\xff\xfe", 422),
        ("/v1/predict", b"[" * 100_000, 400),
        ("/v1/predict", b" " * (5 << 20), 413),
        ("/v2/models/other/infer", {"inputs": []}, 422),
        ("/v2/models/case/infer", {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}, 400),
        ("/v2/models/case/infer", {"inputs": [{"name": "ids", "shape": [2], "datatype": "BYTES", "data": ["a"]}]}, 400),
        ("/v2/models/case/infer", {"inputs": [{"name": "ids", "shape": [1], "datatype": "FP32", "data": ["a"]}]}, 400),
        ("/invocations", {}, 400),
        ("/invocations", {"dataframe_records": [{"name": "a"}]}, 400),
        ("/invocations", {"inputs": []}, 422),
        # Half a character, and what is no id.
        ("/invocations", b'{"inputs": ["\\ud800"]}', 422),
        ("/invocations", b'{"dataframe_records": [{"id": "\\ud800"}]}', 422),
        ("/invocations", b'{"dataframe_split": {"columns": ["id"], "data": [["\\ud800"]]}}', 422),
        ("/invocations", b'{"dataframe_records": [{"id": null}]}', 422),
        ("/invocations", b'{"dataframe_records": [{"id": NaN}]}', 422),
        ("/invocations", b'{"dataframe_records": [{"id": 7.0}]}', 422),
        ("/nowhere", {}, 404),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(served: Served, path: str, body: Any, status: int) -> None:
    found, answer = served.ask(path, body)
    assert found == status, answer
    assert "a" * 100 not in json.dumps(answer)
    assert list(answer) == ["error"]
    assert served.rows("K-1")[0]["state"] == "scored"


def test_what_is_no_request_costs_little(served: Served) -> None:
    """Each of a million wrong ids was looked at for seconds, and nobody else was answered."""
    body = b'{"ids": [' + b"1," * 1_000_000 + b"1]}"
    at_s = time.monotonic()
    assert served.ask("/v1/predict", body)[0] == 422
    assert time.monotonic() - at_s < 3.0


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b'{"ids": ["K-1"]}', "text/plain"), (b"{", "application/json"), (b"[]", "application/json")],
)
def test_a_body_that_is_no_json_object_is_told_what_to_be(
    served: Served, body: bytes, content_type: str
) -> None:
    status, answer = served.ask("/v1/predict", body, {"content-type": content_type})
    words = "give a JSON object, with the header content-type: application/json"
    assert (status, answer) == (422, {"error": words})


def test_ids_of_any_text_harm_nobody(served: Served) -> None:
    odd = ["'; DROP TABLE answers; --", "\x00", "K-1\x1f", "../../etc/passwd", "%s%n", "K-1 ", "İ"]
    assert {row["state"] for row in served.rows(*odd)} == {"unknown"}


def test_another_name_of_this_machine_is_refused(served: Served) -> None:
    """A page in a browser may have its own name lead to 127.0.0.1."""
    assert served.ask("/v1/predict", {"ids": ["K-1"]}, {"host": "evil.example"})[0] == 421


def test_half_a_request_holds_nobody_up(served: Served) -> None:
    host, port = urlsplit(served.url).netloc.split(":")
    held = [socket.create_connection((host, int(port))) for _ in range(20)]
    for each in held:
        each.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{")
    assert served.rows("K-1")[0]["state"] == "scored"
    for each in held:
        each.close()
    # Two requests at once on one connection.
    line = http.client.HTTPConnection(host, int(port), timeout=30)
    for _ in range(2):
        line.request(
            "POST", "/v1/predict", b'{"ids": ["K-1"]}', {"content-type": "application/json"}
        )
        assert line.getresponse().read()
    line.close()


def test_a_party_that_is_killed_is_named_and_comes_back(
    served: Served, want: dict[str, Any]
) -> None:
    served.program("p2").kill()
    served.wait_for(("p1",))
    (row,) = served.rows("K-1")
    assert (row["state"], row["parties"], row["missing"]) == (
        "partly",
        ["p0", "p1"],
        {"p2": "away"},
    )
    assert row["score_1"] != want["K-1"][0]
    # Its set was measured.
    measured = {frozenset(each.parties): each.test for each in worth(served).subsets}
    assert row["expected_quality"] == measured[frozenset(("p0", "p1"))]
    above = 1.0 + row["expected_quality"]
    (none,) = served.rows("K-1", min_quality=above)
    assert (none["state"], none["score_1"]) == ("refused", None)
    assert served.rows("K-1", min_quality=row["expected_quality"])[0]["state"] == "partly"
    # The mean of its training rows stands in for it.
    mean = read_means(served.run.folder / "p0")["p2"]
    people = {name: read(served, name) for name in NAMES}
    z = [served.run.model(name).embed(people[name]) for name in NAMES]
    top = present(served.run.model("p0").top)
    with torch.no_grad():
        outputs = top(torch.cat([*z[:2], mean.expand_as(z[2])], dim=1))
    scores_N = outputs.double().sigmoid().float().flatten().tolist()
    ids = list(want)
    found = {each["id"]: each["score_1"] for each in served.rows(*ids)}
    assert found == dict(zip(ids, scores_N, strict=True))
    served.start("p2").wait_for("attending")
    served.wait_for(NAMES[1:])
    assert scores(served.rows("K-1")) == {"K-1": want["K-1"]}


def test_a_frozen_party_is_late_and_no_request_fails(served: Served, want: dict[str, Any]) -> None:
    served.program("p1").signal(signal.SIGSTOP)

    def asked() -> Any:
        began_s = time.monotonic()
        (row,) = served.rows("K-3")
        assert time.monotonic() - began_s < 5.0
        return row

    try:
        # It answers until it has stopped.
        row = wait_until(asked, lambda row: row["state"] != "scored")
        assert (row["state"], row["missing"]) == ("partly", {"p1": "late"})
    finally:
        served.program("p1").signal(signal.SIGCONT)
    give_up_s = time.monotonic() + 30.0
    while served.rows("K-3")[0]["state"] != "scored":
        assert time.monotonic() < give_up_s
    assert scores(served.rows("K-3")) == {"K-3": want["K-3"]}


def test_a_table_that_changes_is_read_again(served: Served) -> None:
    path = Path(served.federation.data["p2"]["source"])
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    try:
        path.write_text("".join(lines[:-1]))
        assert served.program("p2").wait_for("refreshed")["rows"] == ROWS - 1
        (row,) = served.rows(f"K-{ROWS - 1}")
        assert (row["state"], row["missing"]) == ("partly", {"p2": "not answered"})
        # What cannot be read leaves the rows as they were.
        path.write_text("nothing\n")
        served.program("p2").wait_for("advice")
        assert served.rows("K-1")[0]["state"] == "scored"
    finally:
        path.write_text(whole)
    assert served.program("p2").wait_for("refreshed")["rows"] == ROWS
    assert served.rows(f"K-{ROWS - 1}")[0]["state"] == "scored"


def test_a_table_is_read_when_it_has_stayed_as_it_is(served: Served, tmp_path: Path) -> None:
    """Of half a table the last row has all its cells, and the last of them is another number."""
    trained = load_joint(served.run.folder, "p1")
    files = read_files(served.federation.folder / "p1.toml", recipe=trained.recipe)
    path = tmp_path / "new.csv"
    whole = Path(served.federation.data["p1"]["source"]).read_text()
    path.write_text(whole)
    store = FeatureLookup(files, trained, lambda *_, **__: None, str(path))
    old = store.held
    for end in (len(whole) // 2, len(whole) // 2 + 300):
        path.write_text(whole[:end])
        assert not store.refresh()
        assert store.held is old
    path.write_text(whole[: whole.rindex("K-")])
    assert [store.refresh() for _ in range(3)] == [False, True, False]
    assert len(store.held.places) == ROWS - 1


def scorer(
    served: Served,
    answer: Callable[[str, Sequence[str]], ServingAnswer],
    quality: Quality = Quality(),  # noqa: B008 - it cannot be changed
) -> OnlineScorer:
    """Scores in this process; the passive parties answer so."""
    folder = served.federation.folder
    trained = load_joint(served.run.folder, "p0")
    files = read_files(folder / "p0.toml", recipe=trained.recipe)

    def ask(ids: Sequence[str], timeout_s: float) -> Any:
        _ = timeout_s
        return SimpleNamespace(wait=lambda: {name: answer(name, ids) for name in NAMES[1:]})

    return OnlineScorer(FeatureLookup(files, trained, print), ask, 1.0, quality, {})


def test_a_row_has_no_score_unless_the_parties_that_took_part_were_measured(served: Served) -> None:
    def answer(name: str, ids: Sequence[str]) -> ServingAnswer:
        # One of them does not answer.
        if name == "p2":
            return ServingAnswer(bytes(len(ids)))
        width = served.run.model(name).embed(read(served, name)).shape[1]
        z_ND = np.ones((len(ids), width), "<f4")
        return ServingAnswer(bytes([EMBEDDED] * len(ids)), z_ND.tobytes())

    def row(quality: Quality, least: float | None = None) -> dict[str, Any]:
        return make_rows(["K-1"], scorer(served, answer, quality).score(["K-1"], least))[0]

    for others in ({}, {frozenset(NAMES): 0.9}, {frozenset(("p0", "p2")): 0.9}):
        found = row(Quality("auc", values=others))
        assert (found["state"], found["score_1"], found["class"]) == ("unmeasured", None, None)
        assert (found["parties"], found["missing"]) == (["p0", "p1"], {"p2": "not answered"})
        assert row(Quality("auc", values=others), 0.5)["state"] == "refused"
    measured = Quality("auc", values={frozenset(("p0", "p1")): 0.7})
    found = row(measured)
    assert (found["state"], found["expected_quality"]) == ("partly", 0.7)
    assert found["score_1"] is not None
    assert row(measured, 0.7) == found
    assert row(measured, 0.71)["state"] == "refused"


@pytest.mark.parametrize("most", [3.4e38, 1e30, 1.1e18])
def test_numbers_that_are_too_large_for_the_model_are_in_no_score(
    served: Served, most: float
) -> None:
    """Training refuses such numbers; a row with them lacks the parties that gave them."""
    top = present(served.run.model("p0").top)
    sign_ND = next(top.parameters())[0].detach().sign().reshape(len(NAMES), -1)

    def answer(name: str, ids: Sequence[str]) -> ServingAnswer:
        most_D = most * sign_ND[NAMES.index(name)].numpy()
        z_ND = np.stack([most_D if each == "K-2" else np.ones_like(most_D) for each in ids])
        return ServingAnswer(bytes([EMBEDDED] * len(ids)), z_ND.astype("<f4").tobytes())

    found = scorer(served, answer).score(["K-1", "K-2", "K-3"])
    assert found.state == ["scored", "unmeasured", "scored"]
    assert found.part(1).missing == {"p1": "failed", "p2": "failed"}
    assert np.isfinite(found.columns["score_1"]).all()
    assert json.dumps(make_rows(["K-1", "K-2", "K-3"], found), allow_nan=False)


def test_where_the_time_of_a_request_goes(served: Served) -> None:
    def answer(name: str, ids: Sequence[str]) -> ServingAnswer:
        return ServingAnswer(bytes(len(ids)))

    request = RequestTrace("http", "POST /v1/predict")
    with record_stages([(request, 7), (None, 8)]):
        scorer(served, answer, Quality("auc", student=0.8)).score(["K-1"])
    names, began, ended = zip(*request.stages, strict=True)
    assert names == (QUEUE, OWN, PARTIES, TOP)
    assert began[0] == 7
    assert list(began) == sorted(began)
    assert all(end <= next_ for end, next_ in zip(ended, began[1:], strict=False))


def test_the_access_log_has_no_ids(served: Served) -> None:
    served.rows("K-1", "K-2")
    path = served.run.folder.parent / ACCESS.format("p0")
    text = wait_until(path.read_text, lambda text: '"rows": 2' in text)
    line = json.loads(text.splitlines()[-1])
    assert (line["route"], line["status"], line["model"]) == ("POST /v1/predict", 200, "case")
    assert "K-" not in text


def test_a_program_that_serves_has_no_file_of_a_run_open(served: Served) -> None:
    """``vfl prune`` removes the run with which it has started, once another is in production."""
    port = urlsplit(served.url).port
    (pid,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    found = {Path(each.path) for each in psutil.Process(pid).open_files()}
    out = served.run.folder.parent
    assert {out / name.format("p0") for name in (LOG, ACCESS)} <= found
    assert not [each for each in found if served.run.folder in each.parents]


def test_an_id_that_is_spelt_longer_than_any_is_nobodys(served: Served) -> None:
    """A question with many of them is too long for a message, and all parties lost their stream."""
    asked: list[str] = []

    def answer(name: str, ids: Sequence[str]) -> ServingAnswer:
        asked.extend(ids if name == "p1" else ())
        return ServingAnswer(bytes(len(ids)))

    found = scorer(served, answer)
    held = found._store.held
    found._store.held = replace(held, rules=("nfkc",))
    assert found.score(["\ufdfa" * 1000, "K-1"]).state == ["unknown", "unmeasured"]
    assert asked == ["", "K-1"]
