"""Self-contained HTML pages that work offline and allow only our own styles and script.

>>> page("A run", {"steps": "1,000"}, table(["step", "loss"], ["<td>1</td><td>5.2</td>"]))
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

INNER_STYLE = re.compile("<style>(.*?)</style>", re.DOTALL)


def beside(module: str, name: str) -> str:
    """The text of a file in the folder of a module: `beside(__file__, "page.css")`."""
    return (Path(module).parent / name).read_text(encoding="utf-8")


BASE_STYLE = beside(__file__, "webpage.css")
PAGE = Template(beside(__file__, "webpage.html"))


def page(
    title: str,
    facts: dict[str, str],
    body: str,
    style: str = "",
    script: str = "",
    images: bool = False,
) -> str:
    """A complete page: heading, a row of facts, then `body`, which must be safe HTML and may have
    SVG images with their own <style>. With `images=True`, the script may load images from data
    URLs."""
    style = BASE_STYLE + style
    styles = " ".join(dict.fromkeys(map(csp_hash, [style, *INNER_STYLE.findall(body)])))
    policy = f"default-src 'none'; style-src {styles}"
    if script:
        policy += f"; script-src {csp_hash(script)}" + "; img-src data:" * images
        body += f"\n<script>{script}</script>"
    escaped = (map(escape, fact) for fact in facts.items())
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in escaped)
    return PAGE.substitute(policy=policy, title=escape(title), style=style, facts=rows, body=body)


def csp_hash(text: str) -> str:
    """The hash by which a content security policy allows a style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(header: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """`header` is the HTML of each heading, `rows` that of each row's cells, tags included."""
    head = "".join(f"<th>{name}</th>" if name else "<td></td>" for name in header)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    kind = f' class="{kind}"' if kind else ""
    return f'<div class="scroll" tabindex=0><table{kind}>{head}<tbody>{body}</tbody></table></div>'
