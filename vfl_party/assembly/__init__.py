"""Puts a party together from its files: data, rows, models and phases."""
