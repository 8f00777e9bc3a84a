"""``vfl study``: methods x seeds x numbers of labels, planned, run and compared."""
