"""`vfl-party disclosures`: what has left a party, by run, peer, kind and person; a check of its
record; a signed statement about a run.
"""
