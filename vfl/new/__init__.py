"""``vfl new``: from a raw table to a recipe and a party file."""
