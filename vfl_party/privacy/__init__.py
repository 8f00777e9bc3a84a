"""Trains with differential privacy: plans its cost, and takes the steps within the budget."""
