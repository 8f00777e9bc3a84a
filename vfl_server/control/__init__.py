"""Keeps membership and run state: who has joined, when a generation starts and ends."""
