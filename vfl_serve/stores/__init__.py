"""Feature stores that a serving party queries by id, and the active party's cache of embeddings."""
