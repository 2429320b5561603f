# SPDX-License-Identifier: Apache-2.0
"""Links from a page to files of the repository outside of ``docs/``: the site carries a copy.

Written as plain relative links, they also work where the Markdown is read as it stands.
"""

import re
from pathlib import Path
from typing import Any, Final

from sphinx.application import Sphinx

_LINK: Final = re.compile(r"(?<!!)(\[[^\]]*\])\((\.\./[^)#]+)\)")


def _offer_files(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))

    def target(match: re.Match[str]) -> str:
        path = (page.parent / match[2]).resolve()
        outside = path.is_file() and not path.is_relative_to(app.srcdir)
        return f"{match[1]}(<path:{match[2]}>)" if outside else match[0]

    source[0] = _LINK.sub(target, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the rewriting of links."""
    app.connect("source-read", _offer_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
