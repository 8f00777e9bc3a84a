"""Asks a served model with tritonclient[http]: python triton_http.py HOST:PORT MODEL ID..."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import tritonclient.http as triton

address, model, *ids = sys.argv[1:]
headers = {"authorization": f"Bearer {os.environ['TOKEN']}"} if "TOKEN" in os.environ else {}
client = triton.InferenceServerClient(address)
assert client.is_server_ready(headers=headers)
assert client.is_model_ready(model, headers=headers)
names = [each["name"] for each in client.get_model_metadata(model, headers=headers)["outputs"]]
tensor = triton.InferInput("ids", [len(ids)], "BYTES")
# By default as bytes after the JSON.
tensor.set_data_from_numpy(np.array(ids, object))
# A copy, since it writes into it.
answer = client.infer(model, [tensor], headers=dict(headers))
found = {name: answer.as_numpy(name) for name in names}
# The same with JSON alone.
tensor.set_data_from_numpy(np.array(ids, object), binary_data=False)
wanted = [triton.InferRequestedOutput(name, binary_data=False) for name in names]
again = client.infer(model, [tensor], outputs=wanted, headers=dict(headers))
for name, values in found.items():
    np.testing.assert_array_equal(values.astype(str), again.as_numpy(name).astype(str), name)
print(json.dumps({name: values.tolist() for name, values in found.items()}, default=bytes.decode))
