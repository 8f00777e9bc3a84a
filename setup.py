"""Makes what pyproject.toml cannot say: the README as an index of packages shows it.

Its links and pictures are relative to the repository. They become absolute if ``Source`` in
``[project.urls]`` says where it is; until then their words stay, and the links go.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
RELATIVE = r"(?!https?:|mailto:|#)([^)\s]+)"


def readme(text: str, source: str) -> str:
    """Returns Markdown without links that lead nowhere.

    Args:
        text: the README.
        source: the address of the repository; '' if it has none.
    """
    if not source:
        text = re.sub(rf"^!\[[^\]]*\]\({RELATIVE}\)\n+", "", text, flags=re.MULTILINE)
        return re.sub(rf"!?\[([^\]]*)\]\({RELATIVE}\)", r"\1", text)
    text = re.sub(rf"(!\[[^\]]*\])\({RELATIVE}\)", rf"\1({source}/raw/main/\2)", text)
    return re.sub(rf"(?<!!)(\[[^\]]*\])\({RELATIVE}\)", rf"\1({source}/blob/main/\2)", text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setup(
        long_description=readme(
            (ROOT / "README.md").read_text(), project.get("urls", {}).get("Source", "")
        ),
        long_description_content_type="text/markdown",
    )
