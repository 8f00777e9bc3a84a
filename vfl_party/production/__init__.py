"""Operations on a party's trained runs: measuring input drift and deleting a person's data."""
