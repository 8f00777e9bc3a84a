"""Converts bundles to frames and back. It works on buffers, without torch and sockets."""
