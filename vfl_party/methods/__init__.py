"""The methods, that is, the kinds of phases that a recipe can name. Each is a package with the code
of both sides. Methods do not import each other; ``vfl_party.phases.course`` finds them by name.
"""
