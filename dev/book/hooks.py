"""hooks.py: called by mkdocs (mkdocs.yml).

Chapters link to the source by paths such as ../../fsdp.h, which any forge shows. In HTML these links lead to pages that
are made here, one for each linked file, with its lines numbered; a link whose text is a name in backticks leads to the
line that defines it. Folders and binary files are left out.
"""

import posixpath
import re
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from definitions import C_SUFFIXES, TOP, line_of
from links import NAME

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^()\s#]+)(?:#[^()\s]*)?\)")
linked = set()


def on_pre_build(config):
    linked.clear()


def on_page_markdown(markdown, page, config, files):
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(match):
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        if path.startswith("docs/") and not path.endswith((".sh", ".py")):
            return match.group()
        if (TOP / path).is_dir():
            return text
        linked.add(path)
        up = "../" * page.file.src_uri.count("/")
        name = NAME.fullmatch(text) if path.endswith(C_SUFFIXES) else None
        line = f"#L-{line_of(path, name[1])}" if name else ""
        return f"[{text}]({up}source/{path}.html{line})"

    return LINK.sub(rewritten, markdown)


def lexer_of(path):
    if path.endswith(C_SUFFIXES):
        return CLexer()
    try:
        return get_lexer_for_filename(path)
    except ClassNotFound:
        return TextLexer()


# Browsers start no worker from file://. There, the search runs in a hidden frame instead, which gets the same messages.
SHIM = """<script>
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
    const script = frame.contentDocument.createElement("script");
    this.loaded = new Promise(done => script.onload = done);
    script.src = new URL(url, location);
    frame.contentDocument.body.append(script);
  }
  postMessage(data) { this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data}))); }
};
</script>"""


def on_post_page(output, page, config):
    return re.sub(r'<script src="https://unpkg[^"]*"></script>', lambda match: SHIM, output)


def on_post_build(config):
    for path in sorted(linked):
        dark = HtmlFormatter(style="github-dark").get_style_defs()
        formatter = HtmlFormatter(
            full=True,
            title=path,
            linenos="inline",
            lineanchors="L",
            anchorlinenos=True,
            style="default",
            cssstyles="line-height: 1.4",
        )
        text = highlight((TOP / path).read_text(errors="replace"), lexer_of(path), formatter)
        text = text.replace("</style>", "@media (prefers-color-scheme: dark) {\n" + dark + "}\n</style>", 1)
        out = Path(config["site_dir"]) / "source" / (path + ".html")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
