"""functions.py: exercises in which the reader writes the body of a function.

The function is found by its name. Its body is cut out of the real source at the moment when the exercise is opened, and
the copy with the gap goes to build/exercises/N/. The test program is built with that copy: it is included before
everything else, so its include guard keeps the original out.
"""
import re
import signal
import subprocess
import sys
import textwrap

from answers import BadAnswer
from definitions import functions_of, where
from program import ROOT, WORK, Failure, build, run

SECONDS = 600  # that the tests may take; a wrong order of messages may make ranks wait for each other
MARK = "Write here the body of"


def by_file(names):
    """The file of each function: path -> names."""
    files = {}
    for name in names:
        found = where(name)
        if len(found) != 1:
            raise Failure(f"{name} is defined in {' and '.join(found) or 'no file'}; expected one")
        files.setdefault(found[0], []).append(name)
    return files


def without_bodies(path, names, copy):
    text = (ROOT / path).read_text()
    for name in names:
        _, begin, end = functions_of(text)[name]
        todo = (f'{{\n    // {MARK} {name}\n'
                f'    run_failure("{MARK} {name} in {copy}");\n}}')
        text = text[:begin] + todo + text[end:]
    return text


def copy_of(number, path):
    return f"{WORK}/{number:02}/{path}"


def open_exercise(number, functions):
    print()
    for path, names in by_file(functions).items():
        copy = copy_of(number, path)
        if (ROOT / copy).exists():
            print(f"{copy} is there already and stays as it is; remove it to begin again.")
            continue
        text = without_bodies(path, names, copy)
        (ROOT / copy).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / copy).write_text(text)
        print(f"Edit {copy}: {' and '.join(names)}. Then: make answer N={number}")


def show_bodies(functions):
    for path, names in by_file(functions).items():
        text = (ROOT / path).read_text()
        for name in names:
            begin, _, end = functions_of(text)[name]
            print(f"{path}:\n\n{text[begin:end]}\n")


def test_program(number, functions):
    """Builds build/exercises/N/test_llama3 with the reader's copies of the headers."""
    flags = ["-O1", "-Wno-unused-parameter", "-iquote ."]
    for path in by_file(functions):
        copy = copy_of(number, path)
        if not (ROOT / copy).exists():
            raise BadAnswer(f"{copy} is not there; expected make exercise N={number} first, which writes it")
        if MARK in (ROOT / copy).read_text():
            raise BadAnswer(f"{copy} still has the line '{MARK} …'; replace it and its run_failure by the body")
        flags += [f"-iquote {ROOT / path}".rsplit("/", 1)[0], f"-include {copy}"]
    target = f"{WORK}/{number:02}/test_llama3"
    (ROOT / target).unlink(missing_ok=True)  # make does not know that it depends on the copies
    return build(target, "fp32", f"BUILD={WORK}/{number:02}", f"CFLAGS={' '.join(flags)}")


def check(number, functions, tests, hint):
    try:
        program = test_program(number, functions)
    except Failure as failure:
        copies = [line for line in str(failure).splitlines() if re.search(r"(error|warning): |undefined", line)]
        print("wrong: the test program does not build\n" + "\n".join(copies[:12] or [str(failure)]))
        return False
    print(f"testing: {program.relative_to(ROOT)} {' '.join(tests)}", file=sys.stderr, flush=True)
    try:
        done = run([program, *tests], seconds=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"wrong: the tests did not end within {SECONDS} s. {hint}")
        return False
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    if done.returncode == 0 and not failed and re.search(r"^[1-9][0-9]* passed, 0 failed$", done.stdout, re.M):
        passed = done.stdout.strip().splitlines()[-1]
        print(f"right: {passed}")
        return True
    print("wrong. What the tests found:")
    for line in failed[:4]:
        print(f"  {line[:240]}")
    if not failed:
        code = done.returncode
        ended = f"was stopped by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        print(f"  the test program {ended} {done.stderr.strip()[-400:]}")
    print(textwrap.fill(hint, 119))
    return False
