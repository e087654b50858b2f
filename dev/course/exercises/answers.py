"""answers.py: reads what a reader answers, such as "12.3 GB; 4 %", and compares it with the right values.

An answer has one part for each number that the question asks for, separated by semicolons. A number may have a unit,
thousands separators, an exponent or a sign for percent. If all digits matter (tolerance 0), a rounded number is right
if the exact value rounds to it and it has at least three digits.
"""
import re
from dataclasses import dataclass, field
from decimal import Decimal

LEAST_DIGITS = 3
SCALES = {
    "bytes": {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
              "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50},
    "tokens": {"": 1, "token": 1, "tokens": 1, "k": 10**3, "m": 10**6},
    "micro-batches": {"": 1, "micro-batch": 1, "micro-batches": 1},
    "ranks": {"": 1, "rank": 1, "ranks": 1},
    "steps": {"": 1, "step": 1, "steps": 1},
    "%": {"": 1, "%": 1, "percent": 1},
}
EXAMPLES = {"bytes": "12.3 GB", "tokens": "16,384", "micro-batches": "8", "ranks": "64", "steps": "250",
            "%": "12.5 %"}


class BadAnswer(Exception):
    """What the reader typed cannot be read; the message is one sentence."""


@dataclass
class Number:
    """One number that a question asks for."""
    name: str
    unit: str             # a key of SCALES
    tolerance: float = 0  # relative; 0: exact, or rounded to at least three digits


@dataclass
class Mistake:
    """A wrong value that is easy to reach, and a hint that does not give the right one away."""
    value: float
    hint: str


@dataclass
class Solved:
    """The right values, computed just now, and what explains them."""
    values: list
    mistakes: list                                # for each value: a list of Mistake
    derivation: str = ""
    commands: list = field(default_factory=list)  # that show the right values


@dataclass
class Given:
    value: Decimal
    resolution: Decimal  # of the last digit that was written
    digits: int


def read_number(text, number):
    """A Given, from text such as '12,300,000,000', '12.3e9', '12.3 GB'."""
    expected = f"expected a number of {number.unit}" if number.unit != "%" else "expected a percentage"
    expected += f", such as {EXAMPLES[number.unit]}"
    match = re.fullmatch(r"([+-]?[0-9][0-9,_']*(?:\.[0-9]*)?|\.[0-9]+)((?:[eE][+-]?[0-9]{1,2})?)\s*([^\W\d][\w-]*|%)?",
                         text.strip())
    if not match:
        raise BadAnswer(f"'{text.strip()}' is not a number; {expected}")
    unit = (match[3] or "").lower()
    scales = SCALES[number.unit]
    if unit not in scales:
        raise BadAnswer(f"'{text.strip()}' has the unit '{match[3]}'; {expected}")
    mantissa = Decimal(re.sub("[,_']", "", match[1]))
    exponent = Decimal(10) ** int(match[2][1:] or 0) if match[2] else Decimal(1)
    scale = exponent * scales[unit]
    if number.unit == "%" and not unit and mantissa <= 1:
        scale *= 100  # 0.125 without a sign is a fraction
    digits = mantissa.as_tuple().digits
    last = Decimal(10) ** mantissa.as_tuple().exponent
    if "." not in match[1]:  # zeros at the end of an integer may be a rounding
        last *= Decimal(10) ** (len(str(mantissa)) - len(str(mantissa).rstrip("0"))) if mantissa else 1
        digits = str(abs(mantissa)).rstrip("0")
    return Given(mantissa * scale, last * scale, len(digits))


def read_numbers(text, numbers):
    parts = [part for part in text.split(";") if part.strip()]
    if len(parts) != len(numbers):
        names = "; ".join(number.name for number in numbers)
        plural = "s, separated by semicolons" if len(numbers) > 1 else ""
        raise BadAnswer(f"'{text.strip()}' has {len(parts)} part{'s' * (len(parts) != 1)}; expected {len(numbers)} "
                        f"number{plural}: {names}")
    return [read_number(part, number) for part, number in zip(parts, numbers)]


def is_near(given, value, tolerance):
    """Is the given number this value, within the tolerance, or as far as its digits go?"""
    difference = abs(given.value - Decimal(value))
    if tolerance:
        return difference <= abs(Decimal(value)) * Decimal(tolerance)
    return difference == 0 or (given.digits >= LEAST_DIGITS and difference <= given.resolution / 2)


def is_too_coarse(given, value, tolerance):
    return not tolerance and given.digits < LEAST_DIGITS and abs(given.value - Decimal(value)) <= given.resolution / 2


def judge(given, number, value, mistakes):
    """(is it right, what to say about it)"""
    if is_near(given, value, number.tolerance):
        return True, "right"
    if is_too_coarse(given, value, number.tolerance):
        return False, f"too few digits: give all of them, or at least {LEAST_DIGITS}"
    # Mistakes have a tolerance of half a percent at least: who made one may also have rounded.
    for mistake in mistakes:
        if is_near(given, mistake.value, max(number.tolerance, 0.005)):
            return False, f"wrong. {mistake.hint}"
    factor = float(given.value) / float(value) if value else 0
    if factor and (factor > 1.5 or factor < 1 / 1.5):
        return False, f"wrong: too {'large' if factor > 1 else 'small'}, and no mistake that this exercise knows"
    return False, "wrong, though not far off: no mistake that this exercise knows leads there"
