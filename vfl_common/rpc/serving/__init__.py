"""Questions by id to the passive parties of a served model, over streams that they open."""
