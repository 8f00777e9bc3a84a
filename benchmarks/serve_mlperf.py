"""Asks a served model for single ids as MLPerf's load generator does, in its scenario *server*:
``PYTHON -m benchmarks.serve_mlperf URL SECONDS``, which prints the summary's figures as JSON.

``benchmarks.serve --mlperf PYTHON`` runs it; PYTHON is that of an environment with the package
mlcommons-loadgen and nothing else.
"""

from __future__ import annotations

import importlib
import json
import queue
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.load import Line, address_of, request

RATE, _P99_NS = 100.0, 15_000_000
_CONNECTIONS, _IDS = 32, 1_797


def main() -> None:
    url, seconds = sys.argv[1], float(sys.argv[2])
    lg: Any = importlib.import_module("mlperf_loadgen")
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def answer() -> None:
        line = Line(address_of(url))
        while True:
            sample = waiting.get()
            line.send(request([f"K-{sample.index}"]), 0.0)
            while (found := line.answer()) is None:
                pass
            if not found.startswith(b"HTTP/1.1 200"):
                raise OSError(found[:100])
            lg.QuerySamplesComplete([lg.QuerySampleResponse(sample.id, 0, 0)])

    for _ in range(_CONNECTIONS):
        threading.Thread(target=answer, daemon=True).start()
    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = RATE, _P99_NS
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms, settings.min_query_count = int(1000 * seconds), 1
    sut = lg.ConstructSUT(lambda samples: [waiting.put(each) for each in samples], lambda: None)
    qsl = lg.ConstructQSL(_IDS, _IDS, lambda _samples: None, lambda _samples: None)
    with tempfile.TemporaryDirectory() as folder:
        logs = lg.LogSettings()
        logs.log_output.outdir = folder
        lg.StartTestWithLogSettings(sut, qsl, settings, logs, "")
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
    facts = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in summary.splitlines())
    }
    found = {
        f"p{share:.0f}_ms": int(facts[f"{share:.2f} percentile latency (ns)"]) / 1e6
        for share in (50.0, 90.0, 99.0)
    }
    found["qps"] = float(facts["Completed samples per second"])
    print(json.dumps({"result": facts["Result is"], **found}))


if __name__ == "__main__":
    main()
