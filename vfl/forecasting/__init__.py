"""``vfl forecast``: the bytes and the time of a run, before anything runs."""
