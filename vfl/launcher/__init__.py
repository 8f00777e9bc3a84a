"""Runs our programs as child processes: starts or forks them, watches them, and ends them with
their starter.
"""
