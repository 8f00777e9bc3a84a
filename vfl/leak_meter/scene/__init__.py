"""What an attacker has: the messages that one party received, its own rows, and the truth for
judges.
"""
