"""The page of `vfl report`: one HTML file that shows a run, several runs, or a study to people."""
