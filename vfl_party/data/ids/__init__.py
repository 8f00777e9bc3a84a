"""Makes ids comparable: spells them by rules, joins several columns to one id, sorts them, counts
missing and repeated ones.
"""

from vfl_party.data.ids.looks import ASK, LOOKED_AT, about_zeros, choices, shapes_of, short_look
from vfl_party.data.ids.order import IdCounts, Positions, first_repeated, in_order, kept_rows
from vfl_party.data.ids.spelling import SEPARATOR, normalised
from vfl_party.data.ids.texts import Ids

__all__ = [
    "ASK",
    "LOOKED_AT",
    "SEPARATOR",
    "IdCounts",
    "Ids",
    "Positions",
    "about_zeros",
    "choices",
    "first_repeated",
    "in_order",
    "kept_rows",
    "normalised",
    "shapes_of",
    "short_look",
]
