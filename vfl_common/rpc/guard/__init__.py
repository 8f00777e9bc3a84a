"""Protects a listening process from harmful callers: strangers, floods of connections and endless
messages.
"""
