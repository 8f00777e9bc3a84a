"""What the self-supervised methods share at a party: settings filled in, views, towers, the local step, the report."""
