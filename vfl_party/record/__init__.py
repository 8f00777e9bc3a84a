"""The party's own record of all that leaves it: lines that are only ever added, a Merkle tree over
them, heads that peers cosign, and the history of disclosures.
"""
