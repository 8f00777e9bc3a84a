"""Notes what looks wrong in a table, for the person who has it."""
