"""The data of an attacker: its received messages and rows, and the truth that judges attacks."""
