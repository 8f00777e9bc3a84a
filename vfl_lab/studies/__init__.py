"""``vfl study``: plans, runs and compares methods over seeds and label counts."""
