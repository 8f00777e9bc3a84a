"""``vfl forecast``: the bytes and the time of a run, before it runs."""
