"""Assembles a party from its files: data, aligned rows, models and phases."""
