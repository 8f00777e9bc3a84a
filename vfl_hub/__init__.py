"""A standing federation: a hub with a queue of runs, and nodes that dial out to it."""
