"""``python -m scripts.reference``: writes the generated parts; with ``--check`` it only says which are out of date."""

from __future__ import annotations

import sys

from scripts.reference.pages import DOCS, filled, pages


def main() -> int:
    stale = []
    for page in pages():
        text = page.read_text()
        wanted = filled(text)
        if wanted != text:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(wanted)
    verb = "is out of date: run python -m scripts.reference" if "--check" in sys.argv else "written"
    for page in stale:
        print(f"{page.relative_to(DOCS.parent)} {verb}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
