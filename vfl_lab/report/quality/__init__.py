"""The quality of a run: metrics of its predictions with intervals, curves, differences."""
