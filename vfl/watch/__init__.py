"""`vfl watch`: a live page of a run, on this machine, from the files that the run writes."""
