"""The aggregation server: membership, run state, aggregation, and its program."""
