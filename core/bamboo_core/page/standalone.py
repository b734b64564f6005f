"""A job's page as one HTML file that needs no server: it contains the scripts, the style and the job's document."""

import base64
import hashlib
import re
from importlib.resources import files

from bamboo_core.page.document import Document, encode

NAME = "page.html"  # in a run's output folder
MODULES = ("dom", "charts", "parts", "curves", "asking", "page")  # each imports only earlier ones
IMPORT = re.compile(r'^import \{ ([^}]*) \} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let) (\w+))", re.MULTILINE)
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src {script}; style-src {style};'
    " img-src data:; base-uri 'none'; form-action 'none'\">"
)


def standalone_page(document: Document) -> str:
    """Return the text of an HTML file that shows this document without a server."""
    script, style = bundle(), _file("page.css")
    icon = "data:image/svg+xml;base64," + base64.b64encode(_file("icon.svg").encode()).decode()
    policy = POLICY.format(script=_digest(script), style=_digest(style))
    data = encode(document).decode().replace("<", "\\u003c")  # it cannot close the script element
    replacements = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n  {policy}',
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '  <script type="module" src="page.js"></script>\n': "",
        '<link rel="icon" href="icon.svg"': f'<link rel="icon" href="{icon}"',
        '<img src="icon.svg"': f'<img src="{icon}"',
        "</body>": f'<script type="application/json" id="kept">{data}</script>\n<script>{script}</script>\n</body>',
    }
    page = _file("index.html")
    for old, new in replacements.items():
        assert page.count(old) == 1, f"index.html has {old} {page.count(old)} times"
        page = page.replace(old, new)
    return page


def bundle() -> str:
    """Return the page's JavaScript modules as one script, because a page opened as a file cannot import modules."""
    return "\n".join(["'use strict';", *(_module(name) for name in MODULES)])


def _module(name: str) -> str:
    source = _file(f"{name}.js")
    exports = EXPORT.findall(source)
    source = IMPORT.sub(r"const { \1 } = module_\2;", EXPORT.sub("", source))
    return f"const module_{name} = (() => {{\n{source}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return (files("bamboo_core.page") / "static" / name).read_text(encoding="utf-8")
