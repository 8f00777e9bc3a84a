"""Shared by the parties and the server: errors, configuration, bundles, the wire, identity, the
ledger.
"""
