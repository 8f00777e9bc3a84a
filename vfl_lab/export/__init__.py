"""``vfl export``: exports metrics to TensorBoard and MLflow, and models to files."""
