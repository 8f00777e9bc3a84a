"""Counts what a run exchanges, and what its encoders compute, before anything runs."""
