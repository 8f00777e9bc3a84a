"""The modules that the parties and the server share: errors, configuration, bundles, the wire,
identity and the ledger.
"""
