"""How good a run is: metrics of its kept predictions with intervals, curves, differences."""
