"""Protects a process that listens from callers: strangers, floods, endless messages."""
