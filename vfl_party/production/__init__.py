"""Works on a party's trained runs: input drift, and deleting a person."""
