"""The library: what ``import vfl`` gives. Nothing here imports torch before a run needs it."""
