"""Governs what a party releases: grants, limits over all runs, and reports. See README.md."""
