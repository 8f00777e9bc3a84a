"""Trains models with differential privacy: plans the privacy cost and stops when it is spent."""
