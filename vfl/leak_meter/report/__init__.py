"""The leak meter: ``vfl leaks`` and ``vfl.leaks``: figures of attacks, as a table and a picture."""
