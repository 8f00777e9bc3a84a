"""Makes ids comparable: normalizes them by rules, joins several columns to one id, sorts ids, and
counts missing and repeated ids.
"""

from vfl_party.data.ids.looks import ASK, LOOKED_AT, about_zeros, choices, shapes_of, short_look
from vfl_party.data.ids.order import IdCounts, in_order, select_rows
from vfl_party.data.ids.packed import GrowingTexts, Positions, release_texts, texts_of
from vfl_party.data.ids.spelling import SEPARATOR, normalize_ids
from vfl_party.data.ids.texts import Ids

__all__ = [
    "ASK",
    "LOOKED_AT",
    "SEPARATOR",
    "GrowingTexts",
    "IdCounts",
    "Ids",
    "Positions",
    "about_zeros",
    "choices",
    "in_order",
    "normalize_ids",
    "release_texts",
    "select_rows",
    "shapes_of",
    "short_look",
    "texts_of",
]
