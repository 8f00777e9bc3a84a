"""What a party does with its trained runs: input drift, and deleting a person."""
