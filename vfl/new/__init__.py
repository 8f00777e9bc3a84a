"""``vfl new``: makes a recipe and a party file from a raw table."""
