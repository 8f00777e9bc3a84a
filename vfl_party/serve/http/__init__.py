"""The active party's HTTP port: routes, tokens and limits. Beside `vfl/watch` the only room that imports FastAPI."""
