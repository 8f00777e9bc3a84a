"""One tree: the splits that columns offer, the best of them, the rows of each node."""
