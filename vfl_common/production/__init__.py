"""The model registry of a party, and its log of predictions."""
