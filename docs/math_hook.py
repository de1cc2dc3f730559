"""Formulas as MathML when the pages are built: they need no script, no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page."""

    def drawn(match: re.Match[str]) -> str:
        return convert(
            html.unescape(match[3]).strip(), display="block" if match[2] == "[" else "inline"
        )

    return FORMULA.sub(drawn, content)
