"""Reads the kernel's counts of bytes: by connection and by network interface."""
