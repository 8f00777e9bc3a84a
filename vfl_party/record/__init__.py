"""The evidence log of a party, which is called its record.

It has one line for each bundle that the party sends. Lines are only appended. A Merkle tree over
the lines and heads that peers cosign make later changes visible.
"""
