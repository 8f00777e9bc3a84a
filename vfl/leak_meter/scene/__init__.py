"""The data of an attacker: received messages, its own rows, and the truth for judges."""
