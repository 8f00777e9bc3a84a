"""Runs the programs vfl-server and vfl-party as child processes, which end together with the
process that started them.
"""
