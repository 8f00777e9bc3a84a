"""The active party's HTTP port: routes, tokens and limits, with FastAPI."""
