"""The foundations of a party's code: plug-ins by name, seeds, the division of rows, checkpoints,
devices, and the interface of a phase.
"""
