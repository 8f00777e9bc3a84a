"""What every program of a federation speaks: errors, configuration, bundles, the wire, checkpoints, the runner."""

__version__ = "0.1.0"
