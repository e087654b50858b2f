#!/usr/bin/env python3
"""exercise.py list | question N | answer N [ANSWER] | solution N: the exercises of the book.

Each folder NN-name has question.md, which begins with its title, chapter and purpose, and exercise.py, which computes
the right answer by running the project's programs, at the moment when somebody answers. Called by make: exercise,
answer and solution (dev/course/course.mk). The exit code is 1 only if something could not be read or run.
"""
import importlib.util
import os
import re
import sys
import textwrap
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "book")]
sys.dont_write_bytecode = True
import answers    # noqa: E402  both after the path is set
import functions  # noqa: E402
import program    # noqa: E402


class Exercise:
    """One folder. Its module has NUMBERS and solve(), or FUNCTIONS and TESTS, or check(answer) and solution()."""

    def __init__(self, folder):
        self.folder = folder
        self.number = int(folder.name[:2])
        head, self.text = re.fullmatch(r"---\n(.*?)---\n(.*)", (folder / "question.md").read_text(), re.S).groups()
        fields = dict(line.split(": ", 1) for line in head.splitlines())
        self.title, self.chapter, self.learn = fields["title"], fields["chapter"], fields["learn"]

    @lru_cache(maxsize=None)
    def module(self):
        spec = importlib.util.spec_from_file_location(f"exercise_{self.number}", self.folder / "exercise.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded


@lru_cache(maxsize=None)
def exercises():
    return [Exercise(folder) for folder in sorted(HERE.glob("[0-9][0-9]-*"))]


def find(text):
    every = exercises()
    if text.isascii() and text.isdigit():
        for exercise in every:
            if exercise.number == int(text):
                return exercise
    raise answers.BadAnswer(f"there is no exercise N={text}; expected a number from 1 to {len(every)} "
                            "(make exercise lists them)")


def show_list():
    print("Exercises of the book. `make exercise N=1` prints a question, `make answer N=1 A='…'` checks an answer,\n"
          "`make solution N=1` shows the solution.\n")
    for e in exercises():
        print(f"{e.number:4}  {e.title:44} {e.chapter}")


def show_question(exercise):
    module = exercise.module()
    facts = module.facts() if hasattr(module, "facts") else {}
    if hasattr(module, "FUNCTIONS"):
        facts["file"] = " and ".join(functions.by_file(module.FUNCTIONS))
    text = exercise.text
    for name, value in facts.items():
        text = text.replace("{" + name + "}", str(value))
    print(f"Exercise {exercise.number}: {exercise.title}   (chapter {exercise.chapter})\n\n{text.strip()}")
    if hasattr(module, "FUNCTIONS"):
        functions.open_exercise(exercise.number, module.FUNCTIONS)


def check_numbers(module, answer):
    given = answers.read_numbers(answer, module.NUMBERS)
    solved = module.solve()
    all_right = True
    for i, number in enumerate(module.NUMBERS):
        right, remark = answers.judge(given[i], number, solved.values[i], solved.mistakes[i])
        all_right &= right
        if len(module.NUMBERS) > 1:
            print(f"{number.name}: {remark}")
        elif not right:
            print(remark)
    if all_right:
        print("right")
    return all_right


def check_answer(exercise, answer):
    module = exercise.module()
    n = exercise.number
    if hasattr(module, "FUNCTIONS"):
        right = functions.check(n, module.FUNCTIONS, module.TESTS, module.HINT)
    else:
        if not answer.strip():
            raise answers.BadAnswer(f"there is no answer; expected make answer N={n} A='…' (make exercise N={n} prints "
                                    "the question)")
        check = module.check if hasattr(module, "check") else lambda text: check_numbers(module, text)
        right = check(answer)
    if right:
        print(f"`make solution N={n}` shows the derivation.")
    else:
        print(f"Try again; `make solution N={n}` shows the solution.")


def value_text(value, number):
    """A right value as a reader would write it."""
    if number.unit == "%":
        return f"{value:.4g} %"
    return f"{value:,.0f} {number.unit}"


def show_solution(exercise):
    module = exercise.module()
    print(f"Exercise {exercise.number}: {exercise.title}\n")
    if hasattr(module, "FUNCTIONS"):
        functions.show_bodies(module.FUNCTIONS)
        print(textwrap.dedent(module.DERIVATION).strip())
        return
    if hasattr(module, "solution"):
        derivation, commands = module.solution()
    else:
        solved = module.solve()
        for number, value in zip(module.NUMBERS, solved.values):
            print(f"{number.name}: {value_text(value, number)}")
        derivation, commands = solved.derivation, solved.commands
    print(f"\n{derivation.strip()}\n")
    for command in commands:
        print(f"    {command}")


def main(arguments):
    actions = {"question": show_question, "solution": show_solution}
    try:
        if arguments == ["list"]:
            show_list()
        elif len(arguments) == 2 and arguments[0] in actions:
            actions[arguments[0]](find(arguments[1]))
        elif len(arguments) in (2, 3) and arguments[0] == "answer":
            check_answer(find(arguments[1]), arguments[2] if len(arguments) == 3 else "")
        else:
            raise answers.BadAnswer(f"exercise.py was given {arguments}; expected list, question N, answer N ANSWER or "
                                    "solution N")
    except (answers.BadAnswer, program.Failure) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
