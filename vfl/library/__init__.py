"""The Python library behind ``import vfl``. No module here imports torch before a run needs it."""
