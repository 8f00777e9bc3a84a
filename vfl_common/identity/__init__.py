"""A party's identity: its certificate and key, their checks, and the diagnosis of failed
connections.
"""
