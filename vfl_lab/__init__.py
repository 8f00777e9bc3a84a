"""The laboratory studies runs: it reports, compares, searches and exports them. See README.md."""
