"""Imports what most parties of the tests load after they are forked: on a launcher's path, it spares them that.

Python imports a module of this name when it starts.
"""

# ruff: noqa: F401 - for the children

import safetensors.torch
import sklearn.datasets

import vfl_party.app
