#!/usr/bin/env python3
"""plant_test.py: tests plant.py with a small program. With one fault planted, the program with branches must print what
the program with that edit alone prints, and without a fault what the original prints."""
import os
import shutil
import subprocess
import sys
import tempfile

PROGRAM = r"""
#include <stdio.h>
#define TWICE(x) ((x) + (x))
#define ADD(n)             \
    do {                   \
        total += (n);      \
    } while (0)
enum { SIZE = 4 };
static const int table[] = {1, 2, 3};
static int total;

static int nested(int n) {
    int sum = 0;
    for (int i = 0; i < n; i++) {
        if (i % 2 == 0) sum += i; // not braced
        else
            sum -= 1;
        while (sum > 20) sum /= 2;
    }
    if (n > 5 &&
        sum < 9) return sum;
    return -sum;
}

static int declared(int n) {
    const int a = n + 1, b = table[n % 3];
    int values[SIZE] = {a, b, a * b};
    int c = values[2];
    return values[0] + 10 * values[1] + 100 * c;
}

static int cases(int n) {
    switch (n) {
    case 0: return 7;
    case 1: n += 2; // falls through
    default: n *= 3; break;
    }
    return n;
}

#define FOR_EACH(i, n) for (int i = 0; i < (n); i++)
static int sums(int n) {
    int s = 0;
#pragma omp parallel for reduction(+ : s)
    for (int i = 0; i <= n; i++)
        s += i;
    FOR_EACH(k, n) s++;
    return s;
}

static int counted(int n) {
    static int calls = 0;
    calls += n;
    ADD(calls);
    return calls;
}

int main(void) {
    for (int n = 0; n < 30; n++) {
        printf("%d %d %d %d ", nested(n), declared(n), cases(n), counted(n));
        printf("%d %d %d\n", TWICE(n + 1), total, sums(n));
    }
    return 0;
}
"""

# Each change, and whether plant.py must refuse to make it a branch
FAULTS = [
    ("a condition", "nested\n- i % 2 == 0\n+ i % 3 == 0", False),
    ("a statement that is not braced", "nested\n- sum += i\n+ sum += 2 * i", False),
    ("the branch of an else", "nested\n- sum -= 1;\n+ sum += 1;", False),
    ("the whole if, around other faults", "nested\n- if (i % 2 == 0) sum += i; else sum -= 1;", False),
    ("the end of a loop", "nested\n- i < n\n+ i + 1 < n", False),
    ("the step of a loop", "nested\n- i++\n+ i += 2", False),
    ("the start of a loop", "nested\n- int i = 0\n+ int i = 2", False),
    ("a body that becomes two statements", "nested\n- sum /= 2;\n+ { sum /= 2; sum++; }", False),
    ("a statement after one that is not braced", "nested\n  sum /= 2;\n+ sum++;", False),
    ("a statement before one that is not braced", "nested\n+ sum -= 3;\n  sum /= 2;", False),
    ("an if that loses its condition", "nested\n- if (n > 5 && sum < 9) return sum;\n+ return sum;", False),
    ("a return before the end", "nested\n+ if (sum == 3) return 0;\n  if (n > 5", False),
    ("an initializer", "declared\n- n + 1\n+ n + 2", False),
    ("a declaration with another one after it", "declared\n- const int a = n + 1, b = table[n % 3];\n"
     "+ const int b = table[n % 2], a = b;", False),
    ("an element of an initializer", "declared\n- a * b\n+ a - b", False),
    ("a condition for the rest of a function", "declared\n- int c = values[2];\n"
     "+ if (n == 2) return 5;\n+ int c = values[2] + 1;", False),
    ("a statement after a label", "cases\n- n += 2;\n+ n += 3;", False),
    ("a break that is left out", "cases\n- n *= 3; break;\n+ n *= 4;", False),
    ("a case that is left out", "cases\n- case 0: return 7;", False),
    ("statements in another order", "counted\n+ ADD(calls);\n  calls += n;\n- ADD(calls);", False),
    ("statements that are those of two other faults in part",
     "counted\n- ADD(calls);\n- return calls;\n+ return calls + total;", False),
    ("two places", "counted\n- return calls;\n+ return calls + 1;\n@@ program.c cases\n- return n;\n+ return n - 1;",
     False),
    ("a loop after a pragma", "sums\n- s += i\n+ s += i % 3", False),
    ("the head of a loop after a pragma", "sums\n- i <= n\n+ i < n", False),
    ("a statement after a loop that a macro begins", "sums\n- s++;\n+ s--;", False),
    ("a macro that is an expression", "TWICE\n- (x) + (x)\n+ (x) * (x)", False),
    ("a macro that is statements", "ADD\n- total += (n);\n+ total -= (n);", False),
    ("the size of a static variable", "counted\n- static int calls = 0;\n+ static int calls = 5;", True),
    ("a table", "table\n- 1, 2, 3\n+ 1, 2, 4", True),
    ("a constant", "SIZE\n- SIZE = 4\n+ SIZE = 5", True),
    ("a signature", "nested\n- int n\n+ long n", True),
]
WRONG = [
    ("tokens that are not there", "nested\n- sum += 7;", "0 times"),
    ("tokens that are there twice", "nested\n- sum\n+ total", "times, expected once"),
    ("a function that is not there", "nowhere\n- sum", "has no nowhere"),
]

here = os.path.dirname(os.path.abspath(__file__))
passed = failed = 0


def check(name, good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(f"{'pass' if good else 'FAIL'} plant.py: {name}: {what}"[:200].replace("\n", "; "))


def plant(*arguments, folder):
    return subprocess.run([sys.executable, os.path.join(here, "plant.py"), *arguments], cwd=folder, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def write_faults(path, faults):
    with open(path, "w", encoding="utf-8") as f:
        for name, change, _ in faults:
            f.write(f"more {name}\n  fp32 group: expected\n@@ program.c {change}\n")


def output(folder, *flags, **environment):
    """What the program in a folder prints; the compiler's message if it does not compile"""
    program = os.path.join(folder, "program")
    if flags is not None and not (environment and os.path.exists(program)):
        made = subprocess.run(["cc", "-w", "-fopenmp", *flags, program + ".c", "-o", program], text=True,
                              capture_output=True)
        if made.returncode:
            return made.stderr
    return subprocess.run([program], env={**os.environ, **environment}, text=True, capture_output=True).stdout


def main(work):
    copies = {name: os.path.join(work, name) for name in ("original", "planted", "edited")}
    for folder in copies.values():
        os.mkdir(folder)
        with open(os.path.join(folder, "program.c"), "w", encoding="utf-8") as f:
            f.write(PROGRAM)
    original, planted, edited = copies.values()
    faults = os.path.join(work, "faults.txt")
    write_faults(faults, FAULTS)
    said = plant("check", faults, folder=original)
    check("all changes match", said.returncode == 0, said.stdout.strip())
    said = plant("plant", faults, "fp32", planted, folder=work)
    refused = dict(line.split("\t") for line in said.stdout.splitlines())
    healthy = output(original)
    flags = ("-include", os.path.join(here, "planted.h"))
    check("without a fault, the branches change nothing", output(planted, *flags) == healthy, healthy[:40])
    for number, (name, _, is_refused) in enumerate(FAULTS, 1):
        if (str(number) in refused) != is_refused:
            check(name, False, refused.get(str(number), "it is a branch, but should not be"))
            continue
        if is_refused:
            check(f"{name} is no branch", True, refused[str(number)])
            continue
        shutil.copy(os.path.join(original, "program.c"), edited)
        plant("apply", faults, str(number), edited, folder=work)
        reached = os.path.join(work, "reached")
        expected = output(edited)
        found = output(planted, PLANTED=str(number), PLANTED_REACHED=reached)
        differs = "nothing" if found == expected else next(x for x in zip(found.splitlines(), expected.splitlines())
                                                           if x[0] != x[1])
        check(f"{name}: a branch does what the edit does", found == expected != healthy and
              str(number) in open(reached).read().split(), f"differs: {differs}; {expected[:40]!r}")
    for wrong in WRONG:
        write_faults(faults, [wrong])
        said = plant("check", faults, folder=original)
        check(f"{wrong[0]} are found", said.returncode == 1 and wrong[2] in said.stdout, said.stdout.splitlines()[0])
    print(f"{passed} passed, {failed} failed")
    return failed > 0


with tempfile.TemporaryDirectory() as folder:
    code = main(folder)
sys.exit(code)
