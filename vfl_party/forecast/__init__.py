"""Counts what a run would exchange, and what its encoders compute, before anything runs."""
