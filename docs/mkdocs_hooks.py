"""What `make docs` (mkdocs.yml) does beyond MkDocs: pages from outside docs/, and links as GitHub reads them.

The other Markdown of the repository's root, experiments/ and benchmarks/ are pages of the site under their own paths,
README.md as start.md: the site's first page is docs/index.md. A link between pages is written as it works in the
repository, and is turned into the site's; a link to a file that is no page (code, a configuration) becomes the file's
name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

import kvexp

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = [path for part in ("", "experiments", "benchmarks") for path in sorted((ROOT / part).glob("*.md"))]
LINK = re.compile(r"(?P<text>\[(?:[^][]|\[[^][]*\])*\])\((?P<file>[^)#:\s]+)(?P<anchor>#[^)\s]+)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does, and the site after the version."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.site_name = f"kvexp {kvexp.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, in_site(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn the links of a page."""
    written_in = page.file.src_uri
    source = next((path for path in OUTSIDE if in_site(path) == written_in), DOCS / written_in)

    def turned(link: re.Match[str]) -> str:
        target = (source.parent / link["file"]).resolve()
        if target not in OUTSIDE and DOCS not in target.parents:
            return link["text"][1:-1]
        to = os.path.relpath(in_site(target), Path(written_in).parent)
        return f"{link['text']}({to}{link['anchor'] or ''})"

    return LINK.sub(turned, markdown)


def in_site(path: Path) -> str:
    """Where a file of the repository stands in the site: docs/ is its root."""
    if path == ROOT / "README.md":
        return "start.md"
    return str(path.relative_to(DOCS if DOCS in path.parents else ROOT))
