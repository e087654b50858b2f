#!/usr/bin/env python3
"""plant.py: plants faults into a copy of the source. A file of faults (faults.txt explains its format) names for
each fault the source file, the function, the tokens to replace, and their replacement. White space and comments do not
count.

  plant.py check FAULTS            names the faults whose tokens are not exactly once in their function: exit code 1
  plant.py list FAULTS             a line for each: number, when, build, group, expected, name, separated by tabs
  plant.py plant FAULTS BUILD DIR  changes the source in DIR: all faults of one build, each behind a branch on
                                   planted(NUMBER) (planted.h). It prints the numbers of those that no branch can hold,
                                   with the reason
  plant.py apply FAULTS N DIR      makes the edits of fault N alone, without a branch

A branch surrounds the smallest statements that an edit changes, or the smallest expression of a declaration or of the
head of a loop or condition. Where those of several faults are nested, the inner one is in the unchanged branch."""
import collections
import os
import re
import sys

from c_source import Block, OPEN, Parser, Statement, Token, directives, outside, partners, places, texts, tokenize

BUILDS = ("fp32", "bf16", "cuda-fp32", "cuda-bf16", "cuda-mpi")

# ---------------------------------------------------------------- faults
Fault = collections.namedtuple("Fault", "number when build group expected name hunks")
Hunk = collections.namedtuple("Hunk", "file place old new")
Edit = collections.namedtuple("Edit", "first last text") # tokens [first, last) are replaced by text


def read_faults(path):
    faults = []
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines()
    for number, line in enumerate(lines, 1):
        hunks = faults[-1].hunks if faults else []
        if head := re.match(r"(fault|more) (.+)", line):
            faults.append(Fault(len(faults) + 1, head[1], "", "", "", head[2], []))
        elif place := re.match(r"@@ (\S+) (\S+)$", line):
            hunks.append(Hunk(place[1], place[2], [], []))
        elif hunks and line[:1] in ("-", "+", " "):
            if line[0] != "+":
                hunks[-1].old.append(line[1:])
            if line[0] != "-":
                hunks[-1].new.append(line[1:])
        elif faults and (test := re.match(rf"  ({'|'.join(BUILDS)}) (.+?): (.+)", line)):
            faults[-1] = faults[-1]._replace(build=test[1], group=test[2], expected=test[3])
        elif line and not line.startswith("#"):
            sys.exit(f"error: {path}:{number}: expected a fault, its test, @@ FILE FUNCTION, -, + or a space: {line}")
    for f in faults:
        if not f.build or not f.hunks:
            sys.exit(f"error: {path}: {f.name}: its test or its change is missing")
    return faults


class Source:
    """A file and its places"""

    def __init__(self, folder, name):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            self.text = f.read()
        try:
            self.places = places(self.text)
        except ValueError as why:
            raise ValueError(f"{name}: {why}")

    def find(self, hunk):
        """The place and the edit of a hunk; a ValueError if its tokens are not there exactly once"""
        new_text = "\n".join(hunk.new)
        new_tokens = tokenize(new_text)
        old, new, found = texts(tokenize("\n".join(hunk.old))), texts(new_tokens), []
        named = [p for p in self.places if hunk.place in p.names]
        for p in named:
            here = texts(p.tokens)
            found += [(p, i) for i in range(len(here) - len(old) + 1) if here[i:i + len(old)] == old]
        if not named:
            raise ValueError(f"{hunk.file} has no {hunk.place}")
        if not old or old == new:
            raise ValueError(f"{hunk.file}, {hunk.place}: the fault changes nothing: {' '.join(old)}")
        if len(found) != 1:
            raise ValueError(f"{hunk.file}, {hunk.place}: these tokens occur {len(found)} times, expected once: "
                             f"{' '.join(old)}")
        place, at = found[0]
        most = min(len(old), len(new))
        before = next((i for i in range(most) if old[i] != new[i]), most)
        after = next((i for i in range(most - before) if old[-1 - i] != new[-1 - i]), most - before)
        changed = new_tokens[before:len(new) - after]
        text = new_text[changed[0].start:changed[-1].end] if changed else ""
        return place, Edit(at + before, at + len(old) - after, text)


# ---------------------------------------------------------------- regions: what a branch surrounds
# kind: statements, value, condition or void; edits: all edits of this fault within tokens [first, last)
Region = collections.namedtuple("Region", "fault kind first last edits place block")


def extent(tokens, first, last):
    """Where the tokens from first to last are in the text; where they would be if there are none"""
    start = tokens[first].start if first < len(tokens) else tokens[-1].end
    return (start, tokens[last - 1].end) if first < last else (start, start)


def replaced(text, tokens, first, last, edits):
    """The text of the tokens from first to last with the edits made"""
    out, (at, end) = "", extent(tokens, first, last)
    for e in sorted(edits):
        start, stop = extent(tokens, e.first, e.last)
        start, stop = min(start, end), min(stop, end)
        out += f"{text[at:start]} {e.text} "
        at = stop
    return out + text[at:end]


def is_whole(text, place, first, last, edits, block):
    """Whether the tokens may become the two branches of an if: whole statements, old and new, that declare nothing
    which is used after them, and of which there may be two"""
    tokens, new = place.tokens[first:last], tokenize(replaced(text, place.tokens, first, last, edits))
    conditionals = [d for d in directives(tokens) if not d.startswith("pragma")]
    statics = [b.text for a, b in zip(tokens, tokens[1:]) if a.text == "static" and b.text != "const"]
    if statics or "goto" in texts(tokens):
        return False
    if sum(d.startswith("if") for d in conditionals) != sum(d.startswith("endif") for d in conditionals):
        return False
    try:
        both = [Parser(side).statements(0, len(side)) for side in (tokens, new)]
    except ValueError:
        return False
    later = set(texts(place.tokens[last:block.last]))
    return (block.braces or len(both[0]) == len(both[1]) == 1) and not any(
        s.kind == "label" or s.names & later for side in both for s in side)


def statement_region(text, place, edit, block):
    """The smallest statements of a block, or of a block within it, that an edit changes: (kind, first, last, block)"""
    for s in block.statements:
        for inner in s.blocks:
            if inner.first <= edit.first and edit.last <= inner.last:
                if region := statement_region(text, place, edit, inner):
                    return region
        if s.first <= edit.first and edit.last <= s.last and (s.kind == "declaration" or s.blocks):
            if region := expression_region(text, place, edit, s):
                return *region, block
    cuts = {block.first, block.last}.union(*({s.first, s.last} for s in block.statements))
    ranges = [(a, b) for a in cuts if a <= edit.first for b in cuts if edit.last <= b <= len(place.tokens)]
    for a, b in sorted(ranges, key=lambda r: (r[1] - r[0], -r[0])):
        if is_whole(text, place, a, b, [edit], block):
            return "statements", a, b, block
    return None


def expression_region(text, place, edit, holder):
    """The smallest expression of a declaration or of a head that an edit changes: (kind, first, last)"""
    head = next((h for h in holder.heads if h[0] <= edit.first and edit.last <= h[1]), None)
    if not head or {"static", "constexpr"} & set(texts(place.tokens[head[0]:head[1]])):
        return None
    parser, base, kind = Parser(place.tokens[head[0]:head[1]]), head[0], head[2]
    t, other, low, high = parser.t, parser.other, edit.first - base, edit.last - base
    levels = [(0, head[1] - base)] # between the brackets around the edit, from outside in
    if kind == "value":
        levels += sorted((i + 1, other[i]) for i in other if t[i] in OPEN and i < low and high <= other[i])
    declares = holder.kind == "declaration" or parser.is_declaration(0)
    for first, last in reversed(levels):
        cuts = [i for i in outside(other, first, last) if kind == "value" and t[i] in ("=", ",")]
        a = max([first] + [i + 1 for i in cuts if i < low])
        b = min([last] + [i for i in cuts if i >= high])
        is_type = declares and (a == 0 or (first > 0 and t[first - 1] == "["))
        new = tokenize(replaced(text, place.tokens, a + base, b + base, [edit]))
        if a < b and t[a] != "{" and not is_type and is_expression(new):
            return kind, a + base, b + base
    return None


def is_expression(tokens):
    try:
        partners(tokens)
    except ValueError:
        return False
    return bool(tokens) and not directives(tokens) and not {";", "if", "for", "return"} & set(texts(tokens))


def region_of(text, fault, place, edit):
    """The region of an edit, or the reason why it cannot be a branch"""
    what = min(place.names)
    if place.body is None:
        return "it changes a table or a type"
    if edit.first < place.body:
        return f"it changes the signature of {what}"
    tokens = place.tokens + [Token(";", -1, -1)] * (place.body == 0) # that follows the name of a macro
    try:
        statements = Parser(tokens).statements(place.body, len(tokens) - (place.body > 0))
    except ValueError as why:
        return f"{what} cannot be read: {why}"
    region = statement_region(text, place, edit, Block(place.body, len(place.tokens) - (place.body > 0), place.body > 0,
                                                       statements))
    if not region and place.body == 0:
        whole = (0, len(place.tokens), "value")
        region = expression_region(text, place, edit, Statement("expression", 0, whole[1], [whole], [], set()))
        region = region and (*region, None)
    if not region:
        return f"no statement or expression of {what} can be a branch"
    return Region(fault, *region[:3], [edit], place, region[3])


def joined(text, regions, alone):
    """Overlapping regions of one fault become one. Two that overlap in part grow to the same statements."""
    done = []
    for r in sorted(regions, key=lambda r: (r.place.tokens[0].start, r.first, -r.last)):
        for i, d in enumerate(done):
            overlap = d.place is r.place and r.first < d.last and d.first < r.last
            if overlap and r.last > d.last:
                wide = [x._replace(last=r.last) for x in (d, r._replace(first=d.first))]
                if not all(is_whole(text, x.place, x.first, x.last, x.edits, d.block) for x in wide):
                    alone[r.fault] = f"its statements overlap those of fault {d.fault}"
                    wide = [d]
                others = [x for x in regions if x is not r and x is not d and x.fault not in alone]
                return joined(text, others + wide, alone)
            if overlap and d.fault == r.fault:
                done[i] = d._replace(edits=d.edits + r.edits)
                break
        else:
            done.append(r)
    return done


FORMS = {"value": "(planted({0}) ? ({1}) : ({2}))", "condition": "(planted({0}) ? !!({1}) : !!({2}))",
         "void": "(planted({0}) ? (void)({1}) : (void)({2}))",
         "statements": "{{ if (planted({0})) {{{3}{1}{3}}} else {{{3}{2}{3}}} }}{3}"}


def branches(text, start, end, spans):
    """The text from start to end with a branch for each (start, end, …) of spans, which are sorted and nested"""
    out = ""
    while spans:
        first, last, fault, kind, new, newline = spans.pop(0)
        inner = []
        while spans and first < last and spans[0][1] <= last:
            inner.append(spans.pop(0))
        out += text[start:first] + FORMS[kind].format(fault, new, branches(text, first, last, inner), newline)
        start = last
    return out + text[start:end]


def span(text, r):
    tokens = r.place.tokens
    newline = "\n" if directives(tokens[r.first:r.last]) else " "
    return *extent(tokens, r.first, r.last), r.fault, r.kind, replaced(text, tokens, r.first, r.last, r.edits), newline


# ---------------------------------------------------------------- commands
def write(folder, name, text):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        f.write(text)


def plant(faults, build, folder):
    """Changes the files in a folder. Returns {number: reason} of the faults that cannot be branches."""
    sources, alone, found = {}, {}, collections.defaultdict(list)
    for fault in (f for f in faults if f.build == build):
        for hunk in fault.hunks:
            source = sources.setdefault(hunk.file, Source(folder, hunk.file))
            region = region_of(source.text, fault.number, *source.find(hunk))
            if isinstance(region, str):
                alone[fault.number] = region
            else:
                found[hunk.file].append(region)
    for file, regions in found.items():
        found[file] = joined(sources[file].text, [r for r in regions if r.fault not in alone], alone)
    for file, regions in found.items():
        text = sources[file].text
        spans = [span(text, r) for r in regions if r.fault not in alone]
        write(folder, file, branches(text, 0, len(text), sorted(spans, key=lambda s: (s[0], s[1] > s[0], -s[1]))))
    return alone


def apply(fault, folder):
    """Makes the edits of one fault as they are, without a branch."""
    for hunk in fault.hunks:
        source = Source(folder, hunk.file)
        place, edit = source.find(hunk)
        start, end = extent(place.tokens, edit.first, edit.last)
        indent = "\n" + re.search(r" *$", source.text[:start])[0] if edit.text[-1:] in (";", "}") else " "
        gap = indent if start == end else ""
        write(folder, hunk.file, source.text[:start] + edit.text + gap + source.text[end:])


def check(faults):
    lost = 0
    for fault in faults:
        try:
            for hunk in fault.hunks:
                Source(".", hunk.file).find(hunk)
        except (ValueError, OSError) as why:
            print(f"{fault.name}: {why}")
            lost += 1
    print(f"{len(faults) - lost} of {len(faults)} planted faults match")
    return lost > 0


def main(command, path, *arguments):
    faults = read_faults(path)
    if command == "check":
        return check(faults)
    if command == "list":
        for fault in faults:
            print(*fault[:-1], sep="\t")
    elif command == "apply":
        apply(faults[int(arguments[0]) - 1], arguments[1])
    elif command == "plant":
        for number, reason in sorted(plant(faults, *arguments).items()):
            print(number, reason, sep="\t")
    else:
        sys.exit(f"error: plant.py was given '{command}'; expected check, list, apply or plant")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (ValueError, OSError, TypeError) as error:
        sys.exit(f"error: {error}")
