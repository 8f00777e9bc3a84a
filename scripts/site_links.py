"""A hook of mkdocs: links of a page to files of the repository, which are not part of the site.

On GitHub such a link leads to the file. In the site it leads to the repository if ``repo_url``
names one. If not, the path of the file follows the link's words. A picture outside docs/,
such as a figure of benchmarks/results, is copied into the site. In searches, decisions and results
come after the other pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PICTURE = re.compile(r"!\[([^\]]*)\]\((\.\.?/[^)\s]+)\)")
LAST_IN_SEARCHES = ("contributing/", "results/", "reference/api", "reference/plugins")
FIRST_IN_SEARCHES = ("reference/glossary.md", "tutorials/what-is-vertical-fl.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns the page with its links out of docs/ written anew, and adds its pictures to the site.

    Raises:
        FileNotFoundError: The repository has no such file.
    """
    if page.file.src_uri.startswith(LAST_IN_SEARCHES):
        page.meta["search"] = {"boost": 0.3}
    elif page.file.src_uri in FIRST_IN_SEARCHES:
        page.meta["search"] = {"boost": 2}
    folder = posixpath.dirname(page.file.src_uri)
    root = Path(config.config_file_path).parent

    def outside(link: str) -> str | None:
        target = posixpath.normpath(posixpath.join("docs", folder, link))
        if target.startswith("docs/"):
            return None
        if not (root / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {link}")
        return target

    def shown(found: re.Match[str]) -> str:
        words, link = found.groups()
        target = outside(link)
        if target is None:
            return found.group()
        place = f"figures/{posixpath.basename(target)}"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(root / target)))
        return f"![{words}]({posixpath.relpath(place, folder)})"

    def rewritten(found: re.Match[str]) -> str:
        words, link = found.groups()
        path, _, anchor = link.partition("#")
        target = outside(path)
        if target is None:
            return found.group()
        if config.repo_url:
            heading = f"#{anchor}" if anchor else ""
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{target}{heading})"
        plain = words.strip("`")
        return f"`{target}`" if plain == target else f"{words} (`{target}`)"

    return LINK.sub(rewritten, PICTURE.sub(shown, markdown))
