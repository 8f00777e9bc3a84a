"""``vfl export``: the metrics of a run for TensorBoard and MLflow."""
