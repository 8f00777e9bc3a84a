"""What both programs speak, parties and server: errors, configuration, bundles, the wire, identity,
the ledger.
"""
