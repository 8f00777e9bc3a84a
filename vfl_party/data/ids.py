"""Makes ids comparable: spells them by rules, joins several columns to one id, counts missing and repeated ones.

An id is text, or None if it is missing. The rules are ``vfl_common.config.data.IdRule``:

- ``trim`` drops white space at both ends, none within.
- ``casefold`` makes upper and lower case alike (``str.casefold``: ß is ss).
- ``nfkc`` is Unicode's normal form NFKC: full-width digits and composed letters are written in one way.
- ``digits`` keeps 0 to 9 and nothing else.
- ``email`` is trim and casefold.
- ``phone:CC`` writes a telephone number as E.164, such as +4930123456. CC is the country of numbers that are written
  without one. What is no number is a missing id.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vfl_common.config.data import Duplicates
from vfl_common.errors import Code, InputError

SEPARATOR = "\x1f"  # between the columns of an id: Unicode's own unit separator
Id = str | None
_NO_DIGITS = re.compile("[^0-9]+")
_RULES: dict[str, Callable[[str], str]] = {
    "trim": str.strip,
    "casefold": str.casefold,
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "digits": partial(_NO_DIGITS.sub, ""),
    "email": lambda text: text.strip().casefold(),
}


@dataclass(frozen=True)
class IdCounts:
    """``rows`` of a source, those that miss an id, and those that are left out because another row has theirs."""

    rows: int
    missing: int
    repeated: int

    @classmethod
    def of(cls, ids: Sequence[Id], kept: Sequence[int]) -> IdCounts:
        """Counts the ids of all rows, of which those with the numbers ``kept`` stay."""
        missing = ids.count(None)
        return cls(len(ids), missing, len(ids) - missing - len(kept))

    @property
    def kept(self) -> int:
        return self.rows - self.missing - self.repeated

    @property
    def left_out(self) -> str:
        """Words how many rows are left out, and why; '' if all are kept."""
        why = [f"{self.missing:,} without an id"] if self.missing else []
        why += [f"{self.repeated:,} with a repeated id"] if self.repeated else []
        return f"{self.rows - self.kept:,} of {self.rows:,} rows are left out: {', '.join(why)}" if why else ""


def normalised(parts: Sequence[Sequence[Id]], rules: Sequence[str]) -> list[Id]:
    """Returns the id of each row: each column's part by the rules, the parts joined by ``SEPARATOR``.

    An id is missing if a part is missing, or empty or blank after the rules.

    Raises InputError if a rule cannot be used here.
    """
    steps = [_step(rule) for rule in rules]
    columns = [_spelt(part, steps) for part in parts]
    if len(columns) == 1:
        return columns[0]
    return [None if None in row else SEPARATOR.join(map(str, row)) for row in zip(*columns, strict=True)]


def kept_rows(ids: Sequence[Id], duplicates: Duplicates) -> list[int]:
    """Returns the numbers of the rows to keep, ascending: those with an id, and of those that share one, by policy."""
    first: dict[Id, int] = {}
    for row, each in enumerate(ids):
        first.setdefault(each, row)
    first.pop(None, None)
    if duplicates != "drop":
        return list(first.values())
    times = Counter(ids)
    return [row for each, row in first.items() if times[each] == 1]


def choices(parts: Sequence[Sequence[Id]], rules: Sequence[str], duplicates: Duplicates) -> list[str]:
    """Returns lines for a person who chooses rules and policy: the rows that each choice keeps. They show no id."""
    lines = [f"{len(parts[0]):,} rows in the source"]
    for used in range(len(rules) + 1):
        ids = normalised(parts, rules[:used])
        first, drop = (IdCounts.of(ids, kept_rows(ids, each)) for each in ("first", "drop"))
        counts = drop if duplicates == "drop" else first
        after = f"after {', '.join(rules[:used])}" if used else "as they come"
        found = f"{after}: {first.missing:,} missing, {first.repeated:,} repeat an earlier row's"
        others = f' with duplicates = "first", {drop.kept:,} with "drop"' if first.repeated else ""
        lines.append(f"{found}; kept: {first.kept:,}{others}")
    refused = duplicates == "error" and counts.repeated
    return [*lines, f'duplicates = "{duplicates}": {"refused" if refused else f"{counts.kept:,} rows are kept"}']


def _spelt(part: Sequence[Id], steps: Sequence[Callable[[str], str]]) -> list[Id]:
    for step in steps:
        part = [None if text is None else step(text) for text in part]
    return [text if text and not text.isspace() else None for text in part]


def _step(rule: str) -> Callable[[str], str]:
    kind, _, country = rule.partition(":")
    return _phone(country) if kind == "phone" else _RULES[rule]


def _phone(country: str) -> Callable[[str], str]:
    """Returns the rule for telephone numbers; it gives '' for what is none. Raises InputError."""
    try:
        import phonenumbers
    except ImportError:
        text = f"the id rule 'phone:{country}' needs phonenumbers, which is not installed"
        raise InputError(Code.CONFIG_INVALID, f"{text}: pip install phonenumbers") from None
    if country not in phonenumbers.SUPPORTED_REGIONS:
        text = f"the id rule 'phone:{country}' names no country; give two letters of ISO 3166, such as DE"
        raise InputError(Code.CONFIG_INVALID, text)

    def spelt(text: str) -> str:
        try:
            number = phonenumbers.parse(text, country)
        except phonenumbers.NumberParseException:
            return ""
        # By its length alone: what numbers are in use changes between versions of the library, and parties must agree.
        length = phonenumbers.is_possible_number_with_reason(number)
        if length != phonenumbers.ValidationResult.IS_POSSIBLE:  # also if it has no area code
            return ""
        found: str = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return found

    return spelt
