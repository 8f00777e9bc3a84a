"""Lets parties and references compute on several threads, for ``scripts/try-machines``.

Party files, recipes and references of the tests ask torch for one thread. With
``VFL_TESTS_THREADS=2`` they get two, in the tests' process and in the forks of its launcher. A
program that is started afresh computes on one.
"""

import os

import torch

NUMBER = int(os.environ.get("VFL_TESTS_THREADS", "1"))


def several_threads() -> None:
    """Replaces torch's function, if the environment asks for several threads."""
    set_num_threads = torch.set_num_threads
    if NUMBER > 1:
        torch.set_num_threads = lambda nthreads: set_num_threads(max(NUMBER, nthreads))
