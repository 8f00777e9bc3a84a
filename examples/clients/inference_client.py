"""Asks a served model with open-inference-openapi: python inference_client.py URL MODEL ID..."""

from __future__ import annotations

import json
import os
import sys

import httpx
from open_inference.openapi.client import InferenceRequest, OpenInferenceClient

url, model, *ids = sys.argv[1:]
headers = {"authorization": f"Bearer {os.environ['TOKEN']}"} if "TOKEN" in os.environ else {}
client = OpenInferenceClient(base_url=url, httpx_client=httpx.Client(headers=headers))
client.check_server_readiness()
assert client.read_model_metadata(model).name == model
# It turns text that looks like a number into one: it cannot ask for an id such as 17.
tensor = {"name": "ids", "shape": [len(ids)], "datatype": "BYTES", "data": ids}
answer = client.model_infer(model, request=InferenceRequest(inputs=[tensor]))
print(json.dumps({each.name: each.data.__root__ for each in answer.outputs}))
