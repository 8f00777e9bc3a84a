"""Grants: signed approvals of runs and predictions by a person (``policy.approval``).

A party signs and stores grants, counts their uses, sends them to its peers, and can revoke them.
"""
