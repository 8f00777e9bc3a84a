"""What the self-supervised methods share at a party: the views that they compare."""
