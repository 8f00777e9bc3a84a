"""Measures what an observer of the network learns from sizes and times of unread messages."""
