"""`vfl card`: a model card of a trained run, filled in as far as its files say."""
