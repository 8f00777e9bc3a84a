"""``vfl study``: plans, runs and compares methods x seeds x label counts."""
