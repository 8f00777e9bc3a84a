"""Attacks that read what parties tell each other while trees grow."""
