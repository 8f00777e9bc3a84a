"""Asks a served model with tritonclient[grpc]: python triton_grpc.py HOST:PORT MODEL ID..."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import tritonclient.grpc as triton

address, model, *ids = sys.argv[1:]
headers = {"authorization": f"Bearer {os.environ['TOKEN']}"} if "TOKEN" in os.environ else {}
client = triton.InferenceServerClient(address)
assert client.is_server_live(headers=headers)
assert client.is_server_ready(headers=headers)
assert client.is_model_ready(model, headers=headers)
names = [each.name for each in client.get_model_metadata(model, headers=headers).outputs]
tensor = triton.InferInput("ids", [len(ids)], "BYTES")
tensor.set_data_from_numpy(np.array(ids, object))
answer = client.infer(model, [tensor], headers=headers)
found = {name: answer.as_numpy(name).tolist() for name in names}
print(json.dumps(found, default=bytes.decode))
