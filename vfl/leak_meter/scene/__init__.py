"""What an attacker has: received messages, its own rows, and the truth for judges."""
