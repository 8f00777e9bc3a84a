"""Counts what a run would exchange, before anything runs."""
