"""What attackers train: heads, decoders, encoders of their own."""
