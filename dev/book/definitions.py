"""definitions.py: where the project's C sources define a name, found by words and brackets, not by lines.

Pages link to functions by name (links.py, hooks.py), and exercises cut functions out (functions.py of
dev/course/exercises). A definition is a function with its body, a type, a constant of an enum, a variable at file
scope, or a macro.
"""

import re
import subprocess
from functools import lru_cache
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
C_SUFFIXES = (".h", ".c", ".cu", ".cuh")
NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(\w*)(?:[^\\\n]|\\.)*", re.M | re.S)
# The words at file scope are separated by single spaces, and brackets are empty. Group 1 is the name.
FUNCTION = re.compile(r"\b(\w+) \( \) \{ \}")
ENUM = re.compile(r"\benum (?:\w+ )?\{")
OTHERS = (
    re.compile(r"\b(?:struct|enum|union) (\w+) \{"),
    re.compile(r"\btypedef (?:[^;]* )?(\w+) ;"),
    re.compile(r"(?:\A|(?<=[;}] ))(?!extern |typedef )(?:(?:\w+|\*) )*(\w+) (?:\[ \] )*[=;]"),  # a variable
)


@lru_cache(maxsize=None)
def files():
    """The paths of the project's files, relative to TOP, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise SystemExit(f"error: git does not list the files of {TOP}: {listed.stderr.strip()}")
    return sorted({path for path in listed.stdout.split("\0") if path and (TOP / path).is_file()})


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def file_scope(code):
    """The words and brackets at file scope, of which extern "C" and namespaces are parts; and the offset of each."""
    words, at, depth, length = [], {}, 0, 0
    for match in re.finditer(r"\w+|[^\w\s]", code):
        word = match[0]
        depth = max(0, depth - (word in ")]}"))
        if depth == 0 and word == "{" and (words[-1:] == ["extern"] or words[-2:-1] == ["namespace"]):
            continue
        if depth == 0:
            at[length] = match.start()
            words.append(word)
            length += len(word) + 1
        depth += word in "([{"
    return " ".join(words), at


def scan(text):
    """name -> offset of its definition; and what functions_of says."""
    code = NOT_CODE.sub(blank, text)
    found = {match[2]: match.start() for match in reversed(list(DIRECTIVE.finditer(code))) if match[1] == "define"}
    code = DIRECTIVE.sub(blank, code)
    outside, at = file_scope(code)
    bodies = {}
    for match in FUNCTION.finditer(outside):
        found.setdefault(match[1], at[match.start()])
        begin = max(outside.rfind(end, 0, match.start()) for end in ("; ", "} "))
        bodies.setdefault(match[1], (at[begin + 2 if begin >= 0 else 0], at[match.end() - 3], at[match.end() - 1] + 1))
    for pattern in OTHERS:
        for match in pattern.finditer(outside):
            found.setdefault(match[1], at[match.start(1)])
    for match in ENUM.finditer(outside):
        begin = at[match.end() - 1]
        for constant in re.finditer(r"[{,]\s*(\w+)", code[begin : code.index("}", begin)]):
            found.setdefault(constant[1], begin + constant.start(1))
    return found, bodies


@lru_cache(maxsize=None)
def scanned(path):
    return scan((TOP / path).read_text())


def functions_of(text):
    """Of each function of a source: name -> offsets of its begin, of its body's brace, and of its end."""
    return scan(text)[1]


def line_of(path, name):
    """The line at which a source of C defines a name, or 0."""
    offset = scanned(path)[0].get(name)
    return 0 if offset is None else (TOP / path).read_text().count("\n", 0, offset) + 1


def where(name):
    """The sources of C that define a name."""
    sources = [path for path in files() if path.endswith(C_SUFFIXES)]
    return [path for path in sources if name in (TOP / path).read_text() and name in scanned(path)[0]]
