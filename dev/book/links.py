"""links.py: what pages, comments and scripts point at: links, names of definitions, and paths of files and folders.

- A link to code has a name in backticks as its text and a file as its target, [`fsdp_unshard`](../../fsdp.h), without a
  line; `make book` adds the line. The file must define that name, and so must FILE in `name` in FILE and `name` (FILE).
- A path counts anywhere in a text, in code as in comments; a file's name alone in comments and in code font. It begins
  at the top or at the page's own folder, and so does a name alone in a README.md; after "In `run/`:" a list has names
  of files in run/. NAME, OP, FILE, N and asterisks stand for any letters.

What has moved is found by its name, and corrected if it is in one place only (check.py links).
"""

import fnmatch
import os
import re

from definitions import C_SUFFIXES, TOP, files, line_of, where

# Files of other projects, of readers and of tests, and what programs write; a folder stands for all that is in it
ELSEWHERE = set(
    "cjson/cJSON.h src/pcre2.h magic.h sysexits.h compare.py model.py config/train_shakespeare_char.py "
    "torchtitan/models/utils.py pytorch/module/base.py models/llama3/tokenizer.py models/gpt2/tokenization_gpt2.py "
    "my.py kernels-gpu.md dev/results/kernels-gpu.md build/ out/ include/ tokens/ read.py drawn.py".split()
)
WRITTEN = {"run-data.js"}  # files that programs write, in any folder
COMMAND = "`python3 dev/book/check.py links`"
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1\s*$", re.M | re.S)
COMMENT = re.compile(r"<!--(.*?)-->", re.S)
LINK = re.compile(r"(?<!\\)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)\)")
NAME = re.compile(r"`(\w+)(?:\(\))?`")
END = r"\b(?![./\w-]*\w)"
EXTENSION = r"\.(?:h|cuh?|c|py|sh|mk|md|js|css|sbatch)" + END
PATH = re.compile(r"(?<![\w./*})~>$<])(?<!\w-)(?:\$top/)?([A-Za-z_*][\w*-]*(?:/[\w*.-]+)*" + EXTENSION + ")")
NAME_IN_FILE = re.compile(r"`(\w+)`\s(?:in |of |\()`?([\w./-]+\.(?:h|cuh?|c))" + END)
FOLDER = re.compile(r"`([a-z_]+/[\w/-]*)`")
FOLDER_LIST = re.compile(r"^In `([\w/]+/)`.*:\n\n((?:- .*\n)+)", re.M)
WILDCARD = re.compile(r"\b(?:NAME|OP|FILE|N)\b")
PROSE = {
    ".md": re.compile(r"(?<=`)[\w*-]+\.\w+(?=`)"),
    ".h": re.compile(r"/\*.*?\*/|//[^\n]*", re.S),
    "": re.compile(r'"""(.*?)"""|(?<!\S)#[ !][^\n]*', re.S),
}


def without(pattern, text):
    """The text with spaces in place of what matches, so that offsets and line numbers stay."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def slug(heading):
    """A heading's anchor, as forges and mkdocs make it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def anchors(page):
    text = without(FENCE, (TOP / page).read_text())
    return {slug(match[1]) for match in re.finditer(r"^#+ +(.*)$", text, re.M)} | set(
        re.findall(r'(?:id|name)="([^"]+)"', text)
    )


class Tree:
    """The project's files and folders, as paths from the top. A page, any file that points at others, is one, too."""

    def __init__(self):
        self.files = files()
        self.all = set(self.files)
        for path in self.files:
            while path := os.path.dirname(path):
                self.all.add(path)

    def pages(self):
        texts = [p for p in self.files if re.search(EXTENSION + "$", p) or os.path.basename(p) == "Makefile"]
        return [p for p in texts if p != "dev/test/links.sh"]  # whose own tree is another one

    def named(self, path):
        """The files and folders whose own name is the last of a path."""
        name = os.path.basename(path.rstrip("/"))
        return sorted(p for p in self.all if os.path.basename(p) == name)

    def meant(self, page, path):
        """The files and folders that a path may mean."""
        is_file, path = not path.endswith("/"), WILDCARD.sub("*", path.rstrip("/"))
        if "*" in path:
            return fnmatch.filter(self.files, path if "/" in path else "*" + path)
        near = os.path.normpath(os.path.join(os.path.dirname(page), path))
        found = [p for p in (path, near) if p in self.all]
        only_there = "/" in path or (is_file and os.path.basename(page) == "README.md")
        return found or ([] if only_there else self.named(path))

    def wrong_path(self, there, path, name=None):
        """What is wrong with a path that leads `there`, and must define `name` if that is given; and the right path."""
        if there and (not name or any(line_of(p, name) for p in there if p.endswith(C_SUFFIXES))):
            return None
        same = self.named(path)
        found = where(name) if name else same
        found = [p for p in found if p in same] or found
        defect = f"{path} does not define `{name}`" if name else f"there is no {path}"
        if len(found) == 1:
            right = found[0] + "/" * path.endswith("/")
            return f"{defect}; {right} {'does' if name else 'is there'}: {COMMAND} corrects it", right
        return f"{defect}; name one of {' '.join(found)}" if found else defect, None

    def wrong_link(self, page, text, target):
        """What is wrong with a link, and the right target or None."""
        if re.match(r"[a-z]+:", target):
            known = target.startswith(("https://", "http://", "mailto:"))
            return None if known else (f"({target}) has an unknown scheme", None)
        file, _, anchor = target.partition("#")
        folder = os.path.dirname(page)
        path = os.path.normpath(os.path.join(folder, file)) if file else page
        name = NAME.fullmatch(text) if path.endswith(C_SUFFIXES) else None
        if wrong := self.wrong_path([path] if path in self.all else [], path, name and name[1]):
            return wrong[0], wrong[1] and os.path.relpath(wrong[1], folder or ".") + target[len(file) :]
        if re.fullmatch(r"L\d+", anchor):
            return f"({target}) names a line: {COMMAND} leaves it out", file
        if anchor and path.endswith(".md") and anchor not in anchors(path):
            return f"({target}): the page has no heading #{anchor}", None
        return None

    def links(self, page, text):
        """(begin, end, what is wrong, right target or None) of each link of a page."""
        for match in LINK.finditer(without(COMMENT, without(FENCE, text))):
            yield *match.span(2), self.wrong_link(page, match[1], match[2])

    def paths(self, page, text):
        """The same of each path in a text outside of links."""
        suffix = os.path.splitext(page)[1]
        matches, lists, defined = [], [], {}
        if suffix == ".md":
            text = re.sub(r"\]\([^)]*\)", lambda match: " " * len(match[0]), text)
            matches, lists = list(FOLDER.finditer(text)), list(FOLDER_LIST.finditer(text))
            defined = {m.start(2): m[1] for m in NAME_IN_FILE.finditer(text) if not WILDCARD.fullmatch(m[1])}
        prose = PROSE.get(".h" if suffix in C_SUFFIXES else suffix, PROSE[""])
        in_prose = [match.span() for match in prose.finditer(without(FENCE, text))]
        for match in [*matches, *PATH.finditer(text)]:
            begin, path = match.start(1), match[1]
            is_written = os.path.basename(path) in WRITTEN
            if is_written or path in ELSEWHERE or path.split("/")[0] + "/" in ELSEWHERE:
                continue
            if "/" not in path and begin not in defined:
                if not any(first <= begin < last for first, last in in_prose):
                    continue
                path = next((m[1] + path for m in lists if m.start(2) <= begin < m.end(2)), path)
            yield begin, match.end(1), self.wrong_path(self.meant(page, path), path, defined.get(begin))

    def check(self, page):
        """How many links and paths a page has; and (begin, end, defect, right target or None) of each that is wrong."""
        text = (TOP / page).read_text()
        found = [*self.paths(page, text), *(self.links(page, text) if page.endswith(".md") else [])]
        wrong = []
        for begin, end, defect in found:
            if defect:
                line = text.count("\n", 0, begin) + 1
                wrong.append((begin, end, f"line {line}: {defect[0]}", defect[1]))
        return len(found), wrong

    def correct(self, page):
        """Puts what is right into the page, where that is known."""
        before = after = (TOP / page).read_text()
        for begin, end, _, right in sorted(self.check(page)[1], key=lambda wrong: -wrong[0]):
            after = after[:begin] + (right or after[begin:end]) + after[end:]
        if after != before:
            (TOP / page).write_text(after)
