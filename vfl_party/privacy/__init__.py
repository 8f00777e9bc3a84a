"""Training with differential privacy: what it costs, and the steps that keep it."""
