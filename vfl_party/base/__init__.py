"""What every other room of a party uses: plug-ins by name, seeds, rows dealt, checkpoints, devices,
the interface of a phase.
"""
