"""SecureBoost beside FedOnce: its lines of ``benchmarks.fedonce``, and its bytes as encryption
makes them.

Encryption changes no tree (a test shows it), so the lines run without it. Their gradients and sums
are then counted with the bytes that a ciphertext of Okamoto-Uchiyama has at 2,048 bits. One
encrypted run (``--ou``) is set beside that formula.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from benchmarks.studies import ACTIVE, RESULTS, TEST, VALIDATION, Done, curve
from vfl_common.files import write_atomic
from vfl_common.summary import Summary
from vfl_lab.studies.report import Cost, FineTuned, compute_mean_and_sd
from vfl_party.base.seeds import split_rows
from vfl_party.homomorphic import cipher_bytes, count_sums_per_cipher
from vfl_party.methods.secureboost.forest import bytes_for_bits
from vfl_party.methods.secureboost.joint_walk import rows_at_once

Tables = dict[str, Any]
TREES, COMM, ENCRYPTED, L0 = "SecureBoost", "SecureBoost-Comm", "SecureBoost-Comm-OU", "FedOnce-L0"
BITS = 2048
CLEAR, WIDTH = cipher_bytes("none", BITS), cipher_bytes("ou", BITS)
# G and h as two float32: what the paper may have counted, which leaves encryption out.
FLOATS = 8


def lines_of(boosted: Tables, rows: int, parties: int, upload_bytes: int) -> list[Tables]:
    """Returns SecureBoost, and SecureBoost-Comm: as many trees as FedOnce's bytes pay for, and at
    least one.

    The few trees take whole steps: with the learning rate of hundreds they would hardly move.
    ``rows``: for training; ``upload_bytes``: FedOnce's payload.
    """
    phase = {"kind": "secureboost", "encryption": "none", **boosted}
    trees = max(1, upload_bytes // (rows * (parties - 1) * WIDTH))
    few = {key: value for key, value in phase.items() if key != "early_stopping"}
    few |= {"trees": trees, "learning_rate": 1.0}
    return [{"name": TREES, "finetune": [phase]}, {"name": COMM, "finetune": [few]}]


def encrypted_line(lines: Sequence[Tables]) -> Tables:
    """Returns SecureBoost-Comm with encryption."""
    (phase,) = next(line for line in lines if line["name"] == COMM)["finetune"]
    return {"name": ENCRYPTED, "finetune": [phase | {"encryption": "ou", "key_bits": BITS}]}


def pairs(summary: Summary) -> int:
    """Returns how many pairs of g and h, gradients and sums, have crossed in a run without
    encryption.
    """
    return (
        sum(link.payload_bytes for link in summary.bytes.by_link if link.kind == "gradient")
        // CLEAR
    )


def encrypted(summary: Summary) -> int:
    """Returns the bytes that those pairs would have as ciphertexts, at most.

    One ciphertext carries several sums. How many fill the last one of a message is not known here:
    one more is counted.
    """
    found = 0
    for link in summary.bytes.by_link:
        if link.kind == "gradient":
            crossed = link.payload_bytes // CLEAR
            found += (
                crossed
                if link.sender == ACTIVE
                else crossed // count_sums_per_cipher("ou", BITS) + link.messages
            )
    return found * WIDTH


def counted(done: Done, result: FineTuned) -> FineTuned:
    """Returns the result with the bytes of encryption, if it is one of trees without; headers of
    frames as they are.
    """
    if result.method not in (TREES, COMM):
        return result
    summary = done.summary(result)
    more = encrypted(summary) - pairs(summary) * CLEAR
    cost: Cost = result.finetune
    kinds = cost.kinds | {"gradient": cost.kinds["gradient"] + more}
    return replace(
        result, finetune=replace(cost, message_bytes=cost.message_bytes + more, kinds=kinds)
    )


@dataclass(frozen=True)
class Grown:
    """What one run's training has sent. ``kept``: of the trees; ``rest``: payload without gradients
    and sums.
    """

    trees: int
    kept: int
    pairs: int
    encrypted: int
    rest: int

    def payload(self, width: int) -> int:
        """Returns the payload if each gradient and sum has ``width`` bytes; ``WIDTH``: with
        encryption.
        """
        return (self.encrypted if width == WIDTH else self.pairs * width) + self.rest


def grown(done: Done, result: FineTuned, rows: int) -> Grown:
    """Returns what a run without encryption has sent until its last tree: not the walk of
    validation and test rows.
    """
    summary, folder = done.summary(result), done.folder / result.finetune.run
    (phase,) = json.loads((folder / ACTIVE / "recipe.json").read_text())["phases"]
    trees = len(curve(folder, "secureboost", "loss", "train"))
    losses = (
        [loss for _, loss in curve(folder, "secureboost", "loss")]
        if "early_stopping" in phase["settings"]
        else []
    )
    kept = losses.index(min(losses)) + 1 if losses else trees
    whole, found = summary.bytes.by_phase["secureboost"].payload_bytes, pairs(summary)
    walkers = sum(party.role == "passive" for party in summary.parties)
    splits = split_rows(result.seed, rows, validation=VALIDATION, test=TEST)
    walk = walkers * sum(
        walked(len(splits[name]), kept, phase["settings"]["depth"])
        for name in ("validation", "test")
    )
    return Grown(trees, kept, found, encrypted(summary), whole - found * CLEAR - walk)


def walked(rows: int, trees: int, depth: int) -> int:
    """Returns the payload of a walk: at each level a byte down and a bit up for each row and
    tree.
    """
    most = rows_at_once(trees)
    chunks = [min(most, rows - start) for start in range(0, rows, most)]
    return depth * sum(count * trees + bytes_for_bits(count * trees) for count in chunks)


def print_trees(done: Done, rows: int, upload_bytes: int) -> None:
    """Prints what trees cost beside FedOnce's one upload, and after how many they are as good on
    validation rows.
    """
    check_encrypted(done)
    for method in (TREES, COMM):
        runs = [grown(done, each, rows) for each in done.of(method)]
        if runs:
            trees, kept = (mean(getattr(each, name) for each in runs) for name in ("trees", "kept"))
            print(
                f"{method}: {trees:.1f} trees grown, {kept:.1f} kept; payload, and that of "
                "a tree beside L0's:"
            )
            for width, what in (
                (WIDTH, "OU, 2,048 bits"),
                (CLEAR, "no encryption"),
                (FLOATS, "two float32"),
            ):
                sent = mean(each.payload(width) for each in runs)
                print(
                    f"  {what}, {width} bytes: {sent / 1e6:.2f} MB, "
                    f"{sent / trees / upload_bytes:.2f} times"
                )
    if done.of(TREES):
        _print_reach(done, rows, upload_bytes)


def check_encrypted(done: Done) -> None:
    """Asserts that an encrypted run has the trees and the bytes that are counted for the one
    without encryption.
    """
    for result in done.of(ENCRYPTED):
        summary = done.summary(result)
        plain = next(each for each in done.of(COMM) if each.seed == result.seed)
        sent = sum(link.payload_bytes for link in summary.bytes.by_link if link.kind == "gradient")
        formula = encrypted(done.summary(plain))
        assert sent <= formula <= 1.002 * sent, (
            f"{sent:,} bytes of ciphertexts, and the formula says {formula:,}"
        )
        assert result.metrics == plain.metrics, f"seed {result.seed}: encryption has changed a tree"
        whole, told = (
            result.finetune.kinds["gradient"],
            counted(done, plain).finetune.kinds["gradient"],
        )
        print(
            f"seed {result.seed}, encrypted: {sent:,} bytes of ciphertexts, at most "
            f"{formula:,} by the formula;",
            "the same metrics;",
        )
        took, without = result.finetune.seconds, plain.finetune.seconds
        print(
            f"  messages {whole:,}, counted {told:,}; {took:.0f} s, without encryption "
            f"{without:.0f}"
        )


def _print_reach(done: Done, rows: int, upload_bytes: int) -> None:
    """Compares losses on validation rows, which a round of boosting gives, with FedOnce-L0's in the
    kept table.
    """
    kept = {
        int(row["seed"]): float(row["validation_loss"])
        for row in kept_rows(done)
        if row["method"] == L0
    }
    found = []
    for result in done.of(TREES):
        losses = [
            value for _, value in curve(done.folder / result.finetune.run, "secureboost", "loss")
        ]
        at = next(
            (n for n, loss in enumerate(losses, 1) if loss <= kept.get(result.seed, -1.0)), None
        )
        if at is None:
            print(
                f"seed {result.seed}: never as good as FedOnce-L0, or that is not in the kept table"
            )
            continue
        whole = grown(done, result, rows)
        found.append((at, at * whole.payload(WIDTH) / whole.trees))
    if found:
        (trees, sd), size = (
            compute_mean_and_sd([float(at) for at, _ in found]),
            mean(size for _, size in found),
        )
        print(
            f"as low a validation loss as FedOnce-L0's after {trees:.1f} ± {sd or 0.0:.1f} "
            "trees and"
        )
        print(
            f"  {size / 1e6:.1f} MB (means of {len(found)} seeds): {size / upload_bytes:.0f} times"
        )


def kept_rows(done: Done) -> list[dict[str, str]]:
    """Returns the rows of the study's table in the repository."""
    path = RESULTS / f"{done.study.name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_rows(done: Done) -> None:
    """Puts the study's results into the kept table, in place of rows of the same method and
    seed.
    """
    rows, path = kept_rows(done), RESULTS / f"{done.study.name}.csv"
    new = [
        {name: str(value) for name, value in counted(done, each).row().items()}
        for each in done.results
        if each.method != ENCRYPTED
    ]
    taken = {(row["method"], row["seed"]) for row in new}
    whole = [row for row in rows if (row["method"], row["seed"]) not in taken] + new
    whole.sort(key=lambda row: int(row["seed"]))
    names = list(rows[0] if rows else new[0])
    lines = [names, *([row.get(name, "") for name in names] for row in whole)]
    write_atomic(path, "".join(",".join(line) + "\n" for line in lines))
