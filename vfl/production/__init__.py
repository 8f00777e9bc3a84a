"""Models in use: which run is in production, whether a new one is better, drift, and old runs."""
