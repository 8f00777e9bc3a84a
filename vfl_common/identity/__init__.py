"""A party's identity: its certificate and key, the checks of both, and the diagnosis of failed
connections.
"""
