"""What a person has allowed: grants that a party signs, keeps, counts down, shows its peers, and
revokes (``policy.approval`` of the party file).
"""
