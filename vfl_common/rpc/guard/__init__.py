"""Protects a process that listens from callers: strangers, floods, messages without end."""
