"""The leak meter measures what the exchanges of a run leak. See README.md."""
