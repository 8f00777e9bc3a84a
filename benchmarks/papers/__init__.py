"""The tables and figures of the papers, each by one command: ``python -m benchmarks.papers``.

A paper is a folder, and each of its tables and figures is a file in it with a ``TABLE``: see
``benchmarks.papers.describe``.
"""
