"""What data sets of columns have in common: their files are read by the parties' own readers."""
