"""Asks a served model with MLflow's scoring client: python mlflow_client.py URL MODEL ID..."""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

import pandas as pd
from mlflow.pyfunc.scoring_server.client import ScoringServerClient

url, _, *ids = sys.argv[1:]
# It sends no token, so it can only ask a port that needs none.
client = ScoringServerClient(urlsplit(url).hostname, urlsplit(url).port)
client.ping()
rows = client.invoke(pd.DataFrame({"id": ids}))["predictions"]
print(json.dumps({name: [row[name] for row in rows] for name in rows[0]}))
