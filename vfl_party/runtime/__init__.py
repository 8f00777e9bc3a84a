"""Runs a party as a program: session, transport, progress, the phases in their order, the checks
before.
"""
