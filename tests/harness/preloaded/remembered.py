"""Lets a process, and its forks, parse scikit-learn's tables once: most parties of the tests read
them.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

from sklearn import datasets


def remember() -> None:
    """Replaces the functions that read the two tables that tests use most. A caller gets a copy of
    its own.
    """
    for name in ("load_digits", "load_breast_cancer"):
        setattr(datasets, name, _copies(functools.cache(getattr(datasets, name))))


def _copies(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def copied(**settings: Any) -> Any:
        return copy.deepcopy(read(**settings))

    return copied
