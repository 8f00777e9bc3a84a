"""Methods, the phases that a recipe can name: one folder a kind, with both sides. A method imports
no other. ``vfl_party.phases.course`` finds them by name.
"""
