"""A hook of mkdocs: links of a page to files of the repository, which are not part of the site.

On GitHub such a link leads to the file. In the site it leads to the repository if ``repo_url``
names one. If not, the path of the file stands behind the link's words.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns the page with its links out of docs/ written anew.

    Raises:
        FileNotFoundError: The repository has no such file.
    """
    folder = posixpath.dirname(page.file.src_uri)
    root = Path(config.config_file_path).parent

    def rewritten(found: re.Match[str]) -> str:
        words, link = found.groups()
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join("docs", folder, path))
        if target.startswith("docs/"):
            return found.group()
        if not (root / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {link}")
        if config.repo_url:
            heading = f"#{anchor}" if anchor else ""
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{target}{heading})"
        plain = words.strip("`")
        return f"`{target}`" if plain == target else f"{words} (`{target}`)"

    return LINK.sub(rewritten, markdown)
