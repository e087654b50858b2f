#!/usr/bin/env python3
"""check.py: checks the book (docs/book), so that what it says stays true.

    python3 dev/book/check.py            # the numbers of all chapters, and the links and paths of all files (links.py)
    python3 dev/book/check.py run [NN…]  # also runs the commands, of all chapters or of those that begin with NN
    python3 dev/book/check.py links      # corrects links and paths to what has moved to another file or folder

How a chapter is written so that it can be checked:

- A block of ```console holds commands after `$ ` and what they print. `…` stands for anything within a line, and on a
  line of its own for any lines. A command without output may print anything. Commands run one after another in a folder
  that looks like the top of this repository, with out/ empty. Variables keep their values from one command to the next.
  A command must succeed unless an `error:` is shown.
- A number in the text that has a decimal point, a thousand separator, a percent sign or three digits must be known:
  from a block on the page, such as a command's output, or from a comment that names its source:
      <!-- numbers: 2*8.03e9*4096 = 6.58e13; 16*8/64 = 2 -->   expressions of Python, evaluated here
      <!-- from dev/results/plan-405b.md: 430 0.789 -->       numbers that are in this file of the repository
      <!-- paper Llama 3, section 3.3.2: 430 400 -->           numbers that a source outside the repository reports
      <!-- run make fault N=9, commit d829816: 4.74 -->        a measurement that is not repeated here
      <!-- given: 200 -->                                      assumptions of an example or an exercise
  Numbers after "section", "table", "figure", "chapter" and years in parentheses are no claims.
"""

import ast
import math
import os
import re
import shutil
import subprocess
import sys

from definitions import TOP, where
from links import COMMENT, FENCE, Tree, without

BOOK = TOP / "docs" / "book"
SCRATCH = TOP / "build" / "book" / "run"
PROGRAMS = TOP / "build" / "cpu-fp32"
PROGRAM_NAMES = ("train_llama3", "plan_llama3", "tokens_llama3")
SIZES = (*where("llama3_presets"), "dev/clusters/h100-8.json")  # sizes of models, rates of GPUs: known on every page
LIMIT = 300  # seconds that one command may take
# what Open MPI asks of root, and of machines with fewer cores than ranks
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

NUMBER = re.compile(
    r"(?<![\w.,/#^-])(?:−|-)?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    r"(·10([⁻⁰¹²³⁴-⁹]+))?(?![\w.]*\w)( ?%)?"
)
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
FUNCTIONS = {"log2": math.log2, "log": math.log, "sqrt": math.sqrt, "ceil": math.ceil, "floor": math.floor, "min": min}


class Report:
    """Counts what was checked, and prints a line for each defect and for each kind of check of a page."""

    def __init__(self):
        self.passed = 0
        self.failed = 0

    def check(self, name, defects, what):
        for defect in defects[:20]:
            print(f"FAIL {name}: {defect}")
        self.failed += len(defects)
        if not defects:
            print(f"pass {name}: {what}")
            self.passed += 1


def pages():
    return sorted(BOOK.glob("*.md"))


# ---------------------------------------------------------------------------
# numbers


def value(match):
    """A number's value, and half a unit of its last digit."""
    digits = match.group(1).replace(",", "")
    mantissa = digits.partition("e")[0]
    scale = float(digits) / float(mantissa) if float(mantissa) else 1.0
    if match.group(2):
        scale *= 10.0 ** int(match.group(3).translate(SUPERSCRIPTS))
    decimals = len(mantissa.partition(".")[2])
    return float(mantissa) * scale, 0.5 * 10.0**-decimals * scale


def values(text):
    return [value(match)[0] for match in NUMBER.finditer(text)]


def evaluate(expression):
    """An arithmetic expression of Python: numbers, operators and FUNCTIONS."""
    tree = ast.parse(expression.strip(), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS or isinstance(node, (ast.Attribute, ast.Subscript)):
            raise ValueError(expression)
    return eval(compile(tree, expression, "eval"), {"__builtins__": {}}, FUNCTIONS)


def known_by_comment(comment, constants, defects):
    """The numbers for which a comment names the source. Equations that compute nothing are added to `constants`."""
    kind, _, rest = comment.strip().partition(" ")
    if kind == "numbers:":
        known = []
        for equation in filter(None, (part.strip() for part in rest.replace("\n", " ").split(";"))):
            expression, _, result = equation.rpartition("=")
            match = NUMBER.fullmatch(result.strip())
            if NUMBER.fullmatch(expression.strip()):
                constants.append((equation, float(expression), values(result)))
                continue
            try:
                computed = evaluate(expression)
            except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
                defects.append(f"'{equation}' is no expression = number")
                continue
            if not match:
                defects.append(f"'{equation}': '{result.strip()}' is no number")
                continue
            stated, half = value(match)
            if abs(computed - stated) > half * 1.001:
                defects.append(f"{expression.strip()} is {computed:.6g}, not {result.strip()}")
            known += [stated, computed]
        return known
    if kind == "from":
        file, _, numbers = rest.partition(":")
        if not (TOP / file).is_file():
            defects.append(f"<!-- from {file} --> names no file of the repository")
            return []
        there = values((TOP / file).read_text())
        for match in NUMBER.finditer(numbers):
            number, half = value(match)
            if not any(abs(number - other) <= half * 1.001 for other in there):
                defects.append(f"{match.group(1)} is not in {file}")
        return values(numbers)
    if kind == "given:":
        return values(rest)
    if kind in ("paper", "run"):
        source, _, numbers = rest.partition(":")
        if not source or not numbers:
            defects.append(f"<!-- {kind} {rest} --> needs a source, a colon and numbers")
        return values(numbers)
    return []


def known_constants(constants, known, defects):
    """Equations such as 220.4 = 220 round a number that the page or one of SIZES has; otherwise they prove nothing."""
    there = known + [number for file in SIZES for number in values((TOP / file).read_text())]
    stated = []
    for equation, number, rounded in constants:
        if not any(abs(number - other) <= 1e-9 * abs(number) for other in there):
            defects.append(f"'{equation}' computes nothing: name the number's source")
        stated += rounded
    return stated


def claims(text):
    """The numbers of the text that need a source, each with its line."""
    text = without(COMMENT, without(FENCE, text))
    text = re.sub(r"\]\([^)]*\)", lambda match: "]" + " " * (len(match.group()) - 1), text)
    text = without(re.compile(r"^#+ .*$", re.M), text)
    text = without(re.compile(r"arXiv:? ?\d+\.\d+"), text)
    places = "sections?|tables?|figures?|chapters?|appendix|algorithm|equations?"
    text = without(re.compile(rf"(?i)\b(?:{places}) [\d.]+"), text)
    text = without(re.compile(r"\b(?:19|20)\d\d\b(?=[)\];, ])(?!,\d)"), text)
    for match in NUMBER.finditer(text):
        digits = match.group(1)
        if "." in digits or "," in digits or match.group(2) or match.group(4) or len(digits) > 2:
            yield text.count("\n", 0, match.start()) + 1, match


def check_numbers(report, path):
    text = path.read_text()
    defects, known, constants = [], [], []
    for match in COMMENT.finditer(text):
        known += known_by_comment(match.group(1), constants, defects)
    for match in FENCE.finditer(text):
        known += values(match.group(3))
    known += known_constants(constants, known, defects)
    count = 0
    for line, match in claims(text):
        count += 1
        number, half = value(match)
        if not any(abs(number - other) <= half * 1.001 for other in known):
            defects.append(f"line {line}: {match.group().strip()} has no source")
    report.check(f"{path.relative_to(TOP)}: numbers", defects, f"{count} have a source")


# ---------------------------------------------------------------------------
# commands


def commands(text):
    """The commands of a page, each with the lines that it is expected to print."""
    for match in FENCE.finditer(text):
        if match.group(2) != "console":
            continue
        command, expected, continued = None, [], False
        for line in match.group(3).splitlines():
            if continued:
                command += "\n" + line
            elif line.startswith("$ "):
                if command is not None:
                    yield command, expected
                command, expected = line[2:], []
            else:
                expected.append(line)
            continued = line.endswith("\\") and not expected
        if command is not None:
            yield command, expected


def pattern_of(expected):
    """The regular expression that the output must match."""
    pattern = ""
    for line in expected:
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("…")) + r"[ \t]*\n"
    return pattern + r"\Z"


def folder():
    """A folder that looks like the top of the repository, with the programs in fp32 and an out/ of its own."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    (SCRATCH / "out").mkdir(parents=True)
    for entry in TOP.iterdir():
        if entry.name not in ("out", ".git", *PROGRAM_NAMES):
            (SCRATCH / entry.name).symlink_to(entry)
    for program in PROGRAM_NAMES:
        (SCRATCH / program).symlink_to(PROGRAMS / program)
    return SCRATCH


def in_shell(command):
    """The command between lines that restore and save the shell's variables."""
    state = SCRATCH.parent / "variables"
    return (
        f"if [ -f '{state}' ]; then . '{state}' 2>/dev/null; fi\n{command}\ncode=$?\n"
        f"declare -p | grep -E '^declare -[-x]+ [a-z]' >'{state}'\nexit $code"
    )


def first_difference(expected, output):
    for i in range(len(expected)):
        if not re.match(pattern_of(expected[: i + 1])[: -len(r"\Z")], output):
            return f"expected '{expected[i]}'"
    return "more lines than expected"


def check_commands(report, path):
    name, defects, count = path.relative_to(TOP), [], 0
    where = folder()
    (SCRATCH.parent / "variables").unlink(missing_ok=True)
    environment = dict(os.environ, LC_ALL="C.UTF-8", OMP_NUM_THREADS="1", **AS_ROOT)
    for command, expected in commands(path.read_text()):
        count += 1
        try:
            done = subprocess.run(
                ["bash", "-c", in_shell(command)],
                cwd=where,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            defects.append(f"`{command}` took more than {LIMIT} s")
            continue
        output = done.stdout.decode(errors="replace")
        if not any(line.startswith("note: ") for line in expected):  # some notes depend on the machine
            output = re.sub(r"(?m)^note: .*\n", "", output)
        fails = any(line.startswith("error:") for line in expected)
        if (done.returncode != 0) != fails:
            last = (output.strip().splitlines() or [""])[-1]
            defects.append(f"`{command}` ended with exit code {done.returncode}: {last}")
        elif expected and not re.match(pattern_of(expected), output):
            defects.append(f"`{command}`: {first_difference(expected, output)}, and it printed:\n{output[:3000]}")
    report.check(f"{name}: commands", defects, f"{count} print what the page shows")


def check_links(report):
    tree, defects, count = Tree(), [], 0
    for page in tree.pages():
        found, wrong = tree.check(page)
        count += found
        defects += [f"{page}: {defect}" for _, _, defect, _ in wrong]
    report.check("links and paths", defects, f"{count} in {len(tree.pages())} files lead somewhere")


def main(arguments):
    if arguments[:1] not in ([], ["run"], ["links"]):
        sys.exit(f"error: check.py was given '{arguments[0]}'; expected nothing, run or links")
    if arguments[:1] == ["links"]:
        tree = Tree()
        for page in tree.pages():
            tree.correct(page)
        return
    chosen = [path for path in pages() if not arguments[1:] or path.name.startswith(tuple(arguments[1:]))]
    if not chosen:
        sys.exit(f"error: no page of docs/book begins with {' or '.join(arguments[1:]) or 'anything'}")
    if arguments[:1] == ["run"]:
        for program in PROGRAM_NAMES:
            if not (PROGRAMS / program).is_file():
                sys.exit(f"error: {program} is missing in {PROGRAMS.relative_to(TOP)}: `make book-test` builds it")
    report = Report()
    if not arguments[1:]:
        check_links(report)
    for path in chosen:
        check_numbers(report, path)
        if arguments[:1] == ["run"]:
            check_commands(report, path)
    print(f"\n{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
