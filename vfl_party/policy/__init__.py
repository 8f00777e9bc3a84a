"""Checks of a party before it sends anything: of the proposed run, and of the parties' policies."""
