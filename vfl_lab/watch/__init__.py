"""``vfl watch``: serves a live page of a run on this machine, from the files of the run."""
