"""Benchmarks: each program prints one table and writes JSON. Run them from the repository's root
with ``python -m``.
"""
