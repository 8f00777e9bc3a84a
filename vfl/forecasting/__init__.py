"""``vfl forecast``: forecasts the bytes and the time of a run."""
