"""The HTML page of ``vfl report`` about a run, several runs, a study or a search."""
