"""Reads one table in one way, alone in a process: ``python -m benchmarks.large_read WAY SOURCE
[QUERY]``.

It prints seconds, and the largest resident and anonymous memory above that of before reading, as
JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

EVERY_S = 0.01


class Memory:
    """Looks how much memory this process has, again and again; MiB above the beginning."""

    def __init__(self) -> None:
        self.base = _memory()
        self.most = dict.fromkeys(self.base, 0.0)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.note()
            time.sleep(EVERY_S)

    def note(self) -> None:
        now = _memory()
        self.most = {key: max(value, now[key] - self.base[key]) for key, value in self.most.items()}


def _memory() -> dict[str, float]:
    names = {"VmRSS": "resident", "RssAnon": "anonymous"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        names[line[0][:-1]]: int(line[1]) / 1024 for line in lines if line and line[0][:-1] in names
    }


def read(way: str, source: str, query: str | None) -> int:
    """Reads the table and returns its number of rows. Ways: ours, whole, blocks."""
    if way == "ours":
        from vfl_common.config.data import DataSettings
        from vfl_party.data import load_table

        named = {
            "source": source,
            "id": ("customer",),
            "label": "default",
            "scratch": tempfile.gettempdir(),
        }
        if query is not None:
            named["query"] = query
        return len(load_table(DataSettings.model_validate(named), with_label=True))
    if query is not None:
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(source) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            if way == "whole":
                return int(cursor.fetch_arrow_table().num_rows)
            return sum(batch.num_rows for batch in cursor.fetch_record_batch())
    if source.endswith(".csv"):
        import pyarrow.csv as arrow_csv

        if way == "whole":
            return int(
                arrow_csv.read_csv(source, arrow_csv.ReadOptions(use_threads=False)).num_rows
            )
        return sum(
            batch.num_rows
            for batch in arrow_csv.open_csv(source, arrow_csv.ReadOptions(use_threads=False))
        )
    import pyarrow.parquet as parquet

    if way == "whole":
        return int(parquet.read_table(source, use_threads=False).num_rows)
    return sum(
        batch.num_rows for batch in parquet.ParquetFile(source).iter_batches(use_threads=False)
    )


def main() -> None:
    way, source, query = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    if way == "ours":
        import vfl_party.data  # noqa: F401 - torch comes before the clock starts

    memory = Memory()
    began = time.perf_counter()
    rows = read(way, source, query)
    seconds = time.perf_counter() - began
    memory.note()
    print(
        json.dumps(
            {
                "way": way,
                "rows": rows,
                "seconds": seconds,
                "base": memory.base["resident"],
                **memory.most,
            }
        )
    )


if __name__ == "__main__":
    main()
