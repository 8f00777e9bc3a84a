"""``vfl card``: writes a model card of a trained run from its files."""
