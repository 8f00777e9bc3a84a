"""Trains with differential privacy: what it costs, and the steps that keep to it."""
