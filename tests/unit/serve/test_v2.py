"""The Open Inference Protocol over HTTP and gRPC: the same tensors, the same refusals."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.harness.served_here import Here, serving
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb

Input = dict[str, Any]
NONE = -(2**63)


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with serving() as found:
        yield found


def ids(*names: str) -> Input:
    return {"name": "ids", "shape": [len(names)], "datatype": "BYTES", "data": list(names)}


def prefixed(*names: str) -> bytes:
    data = [each.encode() for each in names]
    return b"".join(struct.pack("<I", len(each)) + each for each in data)


def infer(here: Here, *inputs: Input, **more: Any) -> tuple[int, Any]:
    status, body, _ = here.ask("/v2/models/case/infer", {"inputs": list(inputs), **more})
    return status, json.loads(body)


def message(*inputs: Input) -> pb.ModelInferRequest:
    """Returns a request of gRPC; ``field``: of the contents."""
    found = pb.ModelInferRequest(model_name="case", id="7")
    for each in inputs:
        tensor = found.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        kind = each.get("field", "bytes_contents")
        data = [one.encode() if isinstance(one, str) else one for one in each["data"]]
        getattr(tensor.contents, kind).extend(data)
    return found


def test_outputs_are_the_same_in_all_forms(here: Here) -> None:
    status, answer = infer(here, ids("ada", "bob"), id="7")
    assert (status, answer["id"]) == (200, "7")
    plain = {each["name"]: each["data"] for each in answer["outputs"]}
    assert plain == {
        "score": [0.1, "NaN"],
        "class": [1, NONE],
        "state": ["scored", "unknown"],
        "parties": ["bank", ""],
        "run": ["", ""],
        "present": [True, False, False, False],
        "expected_quality": ["NaN", "NaN"],
    }
    typed = here.call("ModelInfer", message(ids("ada", "bob")))
    assert (typed.model_name, typed.model_version, typed.id) == ("case", "run", "7")
    by_name = {each.name: each for each in typed.outputs}
    assert list(by_name) == list(plain)
    assert by_name["score"].contents.fp64_contents[0] == 0.1
    assert np.isnan(by_name["score"].contents.fp64_contents[1])
    assert list(by_name["class"].contents.int64_contents) == [1, NONE]
    assert list(by_name["state"].contents.bytes_contents) == [b"scored", b"unknown"]
    assert list(by_name["present"].shape) == [2, 2]
    assert list(by_name["present"].contents.bool_contents) == plain["present"]
    given = message()
    given.inputs.add(name="ids", datatype="BYTES", shape=[2])
    given.raw_input_contents.append(prefixed("ada", "bob"))
    given.outputs.add(name="class")
    given.outputs.add(name="parties")
    raw = here.call("ModelInfer", given)
    assert [each.name for each in raw.outputs] == ["class", "parties"]
    assert raw.raw_output_contents[0] == struct.pack("<qq", 1, NONE)
    assert raw.raw_output_contents[1] == prefixed("bank", "")


def test_bytes_after_the_json(here: Here) -> None:
    """As Triton's client sends them, by default."""
    rest = prefixed("ada", "bob") + struct.pack("<dd", 0.5, 2.0)
    inputs = [
        {"name": "ids", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 14}},
        {"name": "x", "shape": [2, 1], "datatype": "FP64", "parameters": {"binary_data_size": 16}},
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    length = {"inference_header_content_length": str(len(head))}
    for kind in ("application/octet-stream", "application/json"):
        status, body, headers = here.ask(
            "/v2/models/case/infer", head + rest, content_type=kind, **length
        )
        assert status == 200, body
        assert here.columns[-1] == {"x": [0.5, 2.0]}
        cut = int(headers["inference-header-content-length"])
        told = {each["name"]: each for each in json.loads(body[:cut])["outputs"]}
        sizes = [each["parameters"]["binary_data_size"] for each in told.values()]
        assert len(body) == cut + sum(sizes)
        assert "data" not in told["score"]
        assert body[cut : cut + 8] == struct.pack("<d", 0.1)
    # One output as bytes, one as JSON.
    wanted = [{"name": "class", "parameters": {"binary_data": True}}, {"name": "state"}]
    status, body, headers = here.ask(
        "/v2/models/case/infer", {"inputs": [ids("ada")], "outputs": wanted}
    )
    cut = int(headers["inference-header-content-length"])
    assert json.loads(body[:cut])["outputs"][1]["data"] == ["scored"]
    assert body[cut:] == struct.pack("<q", 1)
    for size, after in (
        ("0", rest), ("-1", rest), ("x", rest), ("9" * 5000, rest), ("\xb2", rest),
        (str(len(head) + 900), rest), (str(len(head)), rest[:-1]), (str(len(head)), b""),
    ):  # fmt: skip
        status, body, _ = here.ask(
            "/v2/models/case/infer", head + after, inference_header_content_length=size
        )
        assert (status, list(json.loads(body))) == (400, ["error"]), (size, body)


@pytest.mark.parametrize(
    ("datatype", "field", "data", "want"),
    [
        ("BOOL", "bool_contents", [True, False], [True, False]),
        ("INT8", "int_contents", [-3, 7], [-3, 7]),
        ("UINT64", "uint64_contents", [1, 2**64 - 1], [1, 2**64 - 1]),
        ("FP64", "fp64_contents", [0.1, 3], [0.1, 3.0]),
        # What a float of 32 bits is, over JSON too.
        ("FP32", "fp32_contents", [0.1, 2.0], np.array([0.1, 2.0], np.float32).tolist()),
        ("BYTES", "bytes_contents", ["red", "ä"], ["red", "ä"]),
    ],
)
def test_columns_have_their_datatype(
    here: Here, datatype: str, field: str, data: list[Any], want: list[Any]
) -> None:
    column = {"name": "x", "shape": [2], "datatype": datatype, "data": data, "field": field}
    assert infer(here, ids("ada", "bob"), column)[0] == 200
    assert here.columns[-1] == {"x": want}
    here.call("ModelInfer", message(ids("ada", "bob"), column))
    assert here.columns[-1] == {"x": want}
    assert [type(each) for each in here.columns[-1]["x"]] == [type(each) for each in want]


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"datatype": "FP64", "data": ["1", "2"]}, "x: data must be of datatype FP64"),
        ({"datatype": "FP64", "data": [True, 1.0]}, "x: data must be of datatype FP64"),
        ({"datatype": "INT64", "data": [1.5, 2]}, "x: data must be of datatype INT64"),
        ({"datatype": "BOOL", "data": [1, 0]}, "x: data must be of datatype BOOL"),
        ({"datatype": "BYTES", "data": ["a", 1]}, "x: data must be of datatype BYTES"),
        ({"datatype": "INT8", "data": [1, 128]}, "x: data has a number that INT8 cannot hold"),
        ({"datatype": "FP64", "data": [10**400, 1]}, "x: data has a number that FP64 cannot hold"),
        ({"datatype": "INT64", "data": [2**63, 1]}, "x: data has a number that INT64 cannot hold"),
        ({"datatype": "TEXT", "data": ["a", "b"]}, "x: datatype must be BYTES, BOOL, INT8"),
        ({"datatype": "FP64", "data": [1.0]}, "x: data must have as many elements as the shape"),
        ({"datatype": "FP64", "data": [1.0], "shape": [1]}, "x: shape must be [2], one value"),
        ({"datatype": "FP64", "data": [1.0, 2.0], "shape": [1, 2]}, "x: shape must be [2]"),
        ({"datatype": "FP64"}, "x: give data"),
    ],
)
def test_columns_that_are_not_what_they_say(here: Here, column: Input, why: str) -> None:
    given = {"name": "x", "shape": [2], **column}
    status, answer = infer(here, ids("ada", "bob"), given)
    assert status == 400
    assert answer["error"].startswith(f"inputs: {why}")


def test_null_is_a_cell_without_a_value(here: Here) -> None:
    column = {"name": "x", "shape": [2], "datatype": "FP32", "data": [None, 1]}
    assert infer(here, ids("ada", "bob"), column)[0] == 200
    assert here.columns[-1] == {"x": [None, 1.0]}
    assert infer(here, {**ids("ada"), "data": [None]})[0] == 400


def test_what_gRPC_refuses(here: Here) -> None:  # noqa: N802 - its name
    both = message(ids("ada"))
    both.raw_input_contents.append(prefixed("ada"))
    raw = message({**ids("ada"), "data": []})
    raw.raw_input_contents.extend([prefixed("ada"), b""])
    no_text = message({**ids("ada"), "data": [b"\xff"]})
    other_field = message({**ids("ada"), "data": [1], "field": "int64_contents"})
    half = message()
    half.inputs.add(name="ids", datatype="BYTES", shape=[2])
    half.raw_input_contents.append(prefixed("ada") + b"\x09\x00")
    huge = message()
    huge.inputs.add(name="ids", datatype="BYTES", shape=[2**31 - 1, 2**31 - 1])
    huge.raw_input_contents.append(prefixed("ada"))
    deep = message()
    deep.inputs.add(name="ids", datatype="BYTES", shape=[1, 1, 1])
    wrong = message(ids("ada"))
    wrong.outputs.add(name="nothing")
    many = message(*[ids("ada")] * 1001)
    none = message(ids())
    for asked in (
        both,
        raw,
        no_text,
        other_field,
        half,
        huge,
        deep,
        wrong,
        many,
        none,
        b"\xff\xff",
    ):
        code, why = here.refused("ModelInfer", asked)
        assert code == "INVALID_ARGUMENT"
        assert why
        assert "ada" not in why
    long = message(ids("ada"), {**ids("ada"), "name": "\x1b" + "n" * 50_000, "datatype": "none"})
    code, why = here.refused("ModelInfer", long)
    assert (code, why.isprintable()) == ("INVALID_ARGUMENT", True)
    assert here.refused("ModelInfer", message(ids(*"abcdefghijk")))[0] == "RESOURCE_EXHAUSTED"
    assert here.refused("ModelInfer", b" " * (5 << 20))[0] == "RESOURCE_EXHAUSTED"
    other = message(ids("ada"))
    other.model_version = "other"
    assert here.refused("ModelInfer", other)[0] == "NOT_FOUND"
    assert here.refused("ModelReady", pb.ModelReadyRequest(name="other"))[0] == "NOT_FOUND"
    quality = message(ids("ada"))
    quality.parameters["min_quality"].string_param = "high"
    assert here.refused("ModelInfer", quality)[0] == "INVALID_ARGUMENT"
    for number in (math.nan, -math.inf):
        quality.parameters["min_quality"].double_param = number
        assert here.refused("ModelInfer", quality)[0] == "INVALID_ARGUMENT"


def test_what_gRPC_says_of_itself(here: Here) -> None:  # noqa: N802 - its name
    assert here.call("ServerLive", pb.ServerLiveRequest()).live
    assert here.call("ServerReady", pb.ServerReadyRequest()).ready
    assert here.call("ModelReady", pb.ModelReadyRequest(name="case", version="run")).ready
    server = here.call("ServerMetadata", pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("vfl", ["binary_tensor_data"])
    model = here.call("ModelMetadata", pb.ModelMetadataRequest(name="run"))
    assert (model.name, list(model.versions), model.platform) == ("case", ["run"], "vfl")
    told = {each.name: (each.datatype, list(each.shape)) for each in model.outputs}
    assert told["present"] == ("BOOL", [-1, 2])
    answered = here.call("ModelInfer", message(ids("ada")))
    assert list(told) == [each.name for each in answered.outputs]
    assert {each.name: each.datatype for each in answered.outputs} == {
        name: datatype for name, (datatype, _) in told.items()
    }


def test_schema_has_the_published_numbers() -> None:
    """Of kserve/open-inference-protocol; a client that was built from it reads our bytes."""
    asked = pb.ModelInferRequest.DESCRIPTOR.fields_by_name
    assert {name: each.number for name, each in asked.items()} == {
        "model_name": 1, "model_version": 2, "id": 3, "parameters": 4, "inputs": 5, "outputs": 6,
        "raw_input_contents": 7,
    }  # fmt: skip
    contents = pb.InferTensorContents.DESCRIPTOR.fields
    assert [(each.name, each.number) for each in contents] == [
        (f"{name}_contents", number)
        for number, name in enumerate(
            ("bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"), 1
        )
    ]
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "inference.GRPCInferenceService"
    assert {each.name for each in service.methods} == {
        "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer",
    }  # fmt: skip
