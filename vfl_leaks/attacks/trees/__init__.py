"""Attacks that read the messages between parties while trees grow."""
