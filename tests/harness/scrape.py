"""Reads a program's metrics as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(address: str, timeout_s: float = 10.0) -> Samples:
    """Returns {(name, labels): value}, read as Prometheus reads it."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
        return samples(text_string_to_metric_families(answer.read().decode()))


def samples(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())
