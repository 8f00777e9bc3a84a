"""The active party's HTTP port: routes, tokens and limits. The only room that imports FastAPI."""
