"""The common part of data sets of columns: the parties' own readers read their files."""
