"""Models that attackers train: heads, decoders, and their own encoders."""
