# SPDX-License-Identifier: Apache-2.0
"""A sheet of SVG that is legible on light and on dark pages."""

from html import escape
from typing import Final

_STYLE: Final = """
.sheet{fill:#fbfbf9}.ink{fill:#22272e}.soft{fill:#5f6b76}.line{stroke:#5f6b76}
.none{fill:#eceae4}.edge{stroke:#fbfbf9}.bad{fill:#b3402f}.badline{stroke:#b3402f}
.c0{fill:#4878a8}.c1{fill:#d98c3f}.c2{fill:#5a9a6e}.c3{fill:#a3689f}
.on{fill:#fff}
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
@media (prefers-color-scheme:dark){
.sheet{fill:#1b1e22}.ink{fill:#e3e6e8}.soft{fill:#9aa5af}.line{stroke:#9aa5af}
.none{fill:#2b3036}.edge{stroke:#1b1e22}.bad{fill:#e8806d}.badline{stroke:#e8806d}
.c0{fill:#5b8fc4}.c1{fill:#c98440}.c2{fill:#5c9c70}.c3{fill:#a673a3}
}"""


class Canvas:
    """Shapes and words on a rounded sheet; lengths are pixels at full width.

    Args:
        width: Of the sheet.
        height: Of the sheet.
        title: What the drawing shows, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n'
            f"<style>{_STYLE}\n</style>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" class="soft"/></marker>'
            "</defs>\n"
            f'<rect width="{width}" height="{height}" rx="8" class="sheet"/>\n'
        )
        self._shapes: list[str] = []

    def box(
        self, left: float, top: float, width: float, height: float, *, fill: str, opacity: float = 1
    ) -> None:
        """Draw a filled rectangle of one of the classes of the style."""
        faint = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
        self._shapes.append(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" '
            f'class="{fill} edge"{faint}/>'
        )

    def text(
        self,
        left: float,
        top: float,
        words: str,
        *,
        size: int = 13,
        fill: str = "ink",
        anchor: str = "start",
        weight: int = 400,
    ) -> None:
        """Write one line; ``top`` is its base line."""
        self._shapes.append(
            f'<text x="{left:g}" y="{top:g}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" class="{fill}">{escape(words)}</text>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a line that ends in a tip."""
        self._line(start, end, 'class="line" marker-end="url(#tip)"')

    def line(
        self, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False
    ) -> None:
        """Draw a line."""
        self._line(start, end, 'class="line"' + (' stroke-dasharray="4 4"' if dashed else ""))

    def cross(self, left: float, top: float, size: float) -> None:
        """Draw a cross that says no."""
        for sign in (1, -1):
            self._shapes.append(
                f'<path d="M{left - size:g} {top - sign * size:g}L{left + size:g} '
                f'{top + sign * size:g}" class="badline" stroke-width="2.5" fill="none"/>'
            )

    def _line(self, start: tuple[float, float], end: tuple[float, float], rest: str) -> None:
        self._shapes.append(
            f'<path d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" fill="none" '
            f'stroke-width="1.4" {rest}/>'
        )

    def svg(self) -> str:
        """The drawing as a file's text."""
        return self._head + "\n".join(self._shapes) + "\n</svg>\n"
