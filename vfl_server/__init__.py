"""The aggregation server: membership, run state, aggregation, its program."""
