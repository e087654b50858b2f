#!/usr/bin/env python3
"""plant.py: plants faults into a copy of the source. A file of faults (faults.txt) names for each fault the file, the
function, and the tokens that are there and that stand instead. White space and comments do not count.

  plant.py check FAULTS           names the faults whose tokens are not exactly once in their function; exit code 1 then
  plant.py list FAULTS            a line for each fault: number, when, build, group, expected, name, separated by tabs
  plant.py plant FAULTS BUILD DIR changes the sources in DIR so that a program has all faults of one build, each behind
                                  a branch on planted(NUMBER), which is true if PLANTED names the number. It prints the
                                  numbers that cannot be such a branch, with the reason; they need builds of their own
  plant.py apply FAULTS N DIR     makes the edit of fault N alone, without a branch

A branch surrounds the smallest statements that the edit changes, or the smallest expression in a declaration or in the
head of a loop or condition. Where regions of several faults coincide, the inner one is in the unchanged branch of the
outer one."""
import collections
import os
import re
import sys

BUILDS = ("fp32", "bf16", "cuda-fp32", "cuda-bf16", "cuda-mpi")

# ---------------------------------------------------------------- tokens
Token = collections.namedtuple("Token", "text start end")
LEXEME = re.compile(r"""
    (?P<skip> \s+ | \\\n | //[^\n]* | /\*.*?\*/ )
  | (?P<directive> \#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])* )
  | (?P<token> (?:u8|[LuUR])?"(?:\\.|[^"\\])*" | [LuU]?'(?:\\.|[^'\\])*' | \.?[0-9](?:[eEpP][+-]|'[0-9]|[\w.])* | \w+
             | <<=|>>=|\.\.\.|<<<|>>>|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\#\#|. )
  """, re.X | re.S)


def tokenize(text, start=0, end=None):
    """The tokens of text[start:end]. A line of the preprocessor is one token, except within its macro's own place."""
    found, at, end = [], start, len(text) if end is None else end
    while at < end:
        match = LEXEME.match(text, at, end)
        is_directive = match["directive"] and not text[text.rfind("\n", 0, at) + 1:at].strip()
        if match["directive"] and not is_directive:
            match = re.compile(r"##?").match(text, at, end)
            found.append(Token(match[0], at, match.end()))
        elif not match["skip"]:
            found.append(Token(match[0], at, match.end()))
        at = match.end()
    return found


def texts(tokens):
    return [t.text for t in tokens]


OPEN = {"(": ")", "[": "]", "{": "}"}
CLOSE = {v: k for k, v in OPEN.items()}


def partner(tokens):
    """For each bracket the index of the one that belongs to it; an error if they do not match."""
    other, stack = {}, []
    for i, t in enumerate(tokens):
        if t.text in OPEN:
            stack.append(i)
        elif t.text in CLOSE:
            if not stack or tokens[stack[-1]].text != CLOSE[t.text]:
                raise ValueError(f"'{t.text}' closes nothing")
            other[i] = stack.pop()
            other[other[i]] = i
    if stack:
        raise ValueError(f"'{tokens[stack[-1]].text}' is not closed")
    return other


# ---------------------------------------------------------------- functions, tables and macros of a file
# body: the index of the token after the brace with which a function's body begins; 0 in a macro; None in anything else
Place = collections.namedtuple("Place", "name tokens body")
NO_NAMES = {"__attribute__", "__launch_bounds__", "__align__", "alignas", "_Alignas", "noexcept"}


def function_name(tokens, other, first, brace):
    """The name in `name(…) {`, or None if no function begins here."""
    i = brace - 1
    while i > first and tokens[i].text in ("const", "noexcept", "override"):
        i -= 1
    while i > first and tokens[i].text == ")":
        i = other[i] - 1
        if tokens[i].text not in NO_NAMES:
            return tokens[i].text if re.match(r"[A-Za-z_]\w*$", tokens[i].text) else None
        i -= 1
    return None


def declared_name(tokens, other, first, last):
    """The name of a type, table or variable: before `=`, `[` or `;`, or that of the struct, or the first in its braces."""
    i, words = first, []
    while i <= last and tokens[i].text not in ("=", "[", ";", "{"):
        if tokens[i].text == "(":
            i = other[i]
        elif re.match(r"[A-Za-z_]\w*$", tokens[i].text):
            words.append(tokens[i].text)
        i += 1
    kind = next((w for w in words if w in ("enum", "struct", "union")), None)
    if kind and i <= last and tokens[i].text == "{":
        behind = texts(tokens[other[i] + 1:last])
        names = words[words.index(kind) + 1:] + [w for w in behind if re.match(r"[A-Za-z_]\w*$", w)] + [tokens[i + 1].text]
        return names[0]
    return words[-1] if words else ""


def places(text):
    """All functions, tables, types and macros of a file."""
    tokens = tokenize(text)
    other, found, first, i = partner(tokens), [], 0, 0
    while i < len(tokens):
        t = tokens[i].text
        if t.startswith("#") and len(t) > 2:
            define = re.match(r"#\s*define\s+(\w+)(\([^)]*\))?", t)
            if define:
                inside = tokenize(text, tokens[i].start + define.end(), tokens[i].end)
                found.append(Place(define[1], inside, 0))
            if first == i:
                first = i + 1
        elif t == "{" and tokens[i - 1].text.startswith('"') and tokens[i - 2].text == "extern":
            first = i + 1 # extern "C" {: what is inside belongs to the file
        elif t == "{" and any(tokens[k].text == "namespace" for k in (i - 1, i - 2)):
            first = i + 1
        elif t == "{" and (name := function_name(tokens, other, first, i)):
            found.append(Place(name, tokens[first:other[i] + 1], i + 1 - first))
            i = other[i]
            first = i + 1
        elif t in OPEN:
            i = other[i]
        elif t == "}":
            first = i + 1
        elif t == ";":
            found.append(Place(declared_name(tokens, other, first, i), tokens[first:i + 1], None))
            first = i + 1
        i += 1
    return found


# ---------------------------------------------------------------- statements
# first to last: its tokens; heads: (first, last, kind) of its expressions; blocks: those that it controls; names: what
# it declares
Statement = collections.namedtuple("Statement", "kind first last heads blocks names")
Block = collections.namedtuple("Block", "first last braces statements")
TYPE_WORDS = set("""auto bool char const constexpr double enum extern float int int32_t int64_t long register short
    signed size_t static struct thread_local typedef uint32_t uint64_t uint8_t union unsigned void volatile
    _Alignas alignas _Thread_local __align__ __shared__ __attribute__ using""".split())
CONTROL = ("if", "for", "while", "switch", "do")
NOT_TYPES = set("return goto break continue else delete new throw case default sizeof".split()).union(CONTROL)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")


class Parser:
    """Statements of a function's body. A ValueError says that the tokens are no whole statements."""

    def __init__(self, tokens):
        self.t = texts(tokens) + [""]
        self.other = partner(tokens)

    def is_name(self, i):
        return bool(IDENTIFIER.match(self.t[i])) and self.t[i] not in NOT_TYPES

    def is_declaration(self, i):
        t = self.t
        if t[i] in TYPE_WORDS:
            return True
        if not self.is_name(i):
            return False
        i += 1
        while t[i] == "::" and self.is_name(i + 1):
            i += 2
        if t[i] == "<": # the arguments of a template
            depth, k = 0, i
            while t[k] not in (";", "{", ""):
                depth += (t[k] == "<") - (t[k] == ">") - 2 * (t[k] == ">>")
                k += 1
                if depth <= 0:
                    break
            i = k if depth <= 0 else i
        stars = i
        while t[i] in ("*", "&", "const", "restrict", "__restrict__"):
            i += 1
        return self.is_name(i) and t[i + 1] in ("=", ";", ",", "[", ":", ")") + (() if i > stars else ("(", "{"))

    def names_of(self, first, last):
        """What a declaration declares: the names before an initializer, a comma or the end"""
        found, i, in_value = set(), first, False
        while i < last:
            in_value = self.t[i] == "=" or (in_value and self.t[i] != ",")
            if self.is_name(i) and not in_value and self.t[i + 1] in ("=", ";", ",", "[", "{"):
                found.add(self.t[i])
            i = self.other[i] + 1 if self.t[i] in OPEN else i + 1
        return found

    def to_semicolon(self, i):
        while self.t[i] != ";":
            if self.t[i] in OPEN:
                i = self.other[i]
            elif self.t[i] in ("}", "", ")", "]"):
                raise ValueError(f"a statement ends with '{self.t[i]}'")
            i += 1
        return i + 1

    def block(self, i):
        """What belongs to an if or a loop: a block in braces, or one statement."""
        if self.t[i] == "{":
            end = self.other[i]
            return Block(i + 1, end, True, self.statements(i + 1, end)), end + 1
        s = self.statement(i)
        return Block(i, s.last, False, [s]), s.last

    def parenthesis(self, i):
        if self.t[i] != "(":
            raise ValueError(f"'(' is missing before '{self.t[i]}'")
        return i + 1, self.other[i]

    def controlled(self, i):
        """if, for, while, switch, or a macro that is the head of a loop"""
        kind, start = self.t[i], i
        if kind == "if" and self.t[i + 1] == "constexpr":
            i += 1
        first, last = self.parenthesis(i + 1)
        heads = [(first, last, "constant" if self.t[i] == "constexpr" else
                  "condition" if kind in ("if", "while") else "value")]
        if kind == "for":
            cuts = [k for k in range(first, last) if self.t[k] == ";" and self.depth_is_zero(first, k)]
            heads = [(first, last, "value")] if len(cuts) != 2 else [
                (first, cuts[0], "value"), (cuts[0] + 1, cuts[1], "condition"), (cuts[1] + 1, last, "void")]
        block, i = self.block(last + 1)
        blocks = [block]
        if kind == "if" and self.t[i] == "else":
            block, i = self.block(i + 1)
            blocks.append(block)
        return Statement(kind, start, i, heads, blocks, set())

    def depth_is_zero(self, first, k):
        i = first
        while i < k:
            i = self.other[i] + 1 if self.t[i] in OPEN else i + 1
        return i == k

    def statement(self, i):
        t = self.t[i]
        if t == "{":
            block, end = self.block(i)
            return Statement("block", i, end, [], [block], set())
        if t.startswith("#"):
            if not re.match(r"#\s*pragma", t):
                return Statement("directive", i, i + 1, [], [], set())
            s = self.statement(i + 1) # a pragma belongs to the statement after it, whose parts remain visible
            return Statement("pragma", i, s.last, [], s.blocks, s.names)
        if self.is_name(i) and self.t[i + 1] in CONTROL: # a macro for such a pragma
            return self.statement(i + 1)._replace(first=i)
        if t in CONTROL[:-1]:
            return self.controlled(i)
        if t == "do":
            block, end = self.block(i + 1)
            first, last = self.parenthesis(end + 1)
            return Statement("do", i, self.to_semicolon(last + 1), [(first, last, "condition")], [block], set())
        if t in ("case", "default") or (self.is_name(i) and self.t[i + 1] == ":"):
            while self.t[i] != ":":
                i += 1 if self.t[i] not in OPEN else self.other[i] - i
            return Statement("label", i, i + 1, [], [], set())
        if self.is_declaration(i):
            end = self.to_semicolon(i)
            return Statement("declaration", i, end, [(i, end - 1, "value")], self.lambdas(i, end), self.names_of(i, end))
        if self.is_name(i) and self.t[i + 1] == "(":
            after = self.t[self.other[i + 1] + 1]
            if after == "{" or IDENTIFIER.match(after):
                return self.controlled(i)
        end = self.to_semicolon(i)
        return Statement("expression", i, end, [(i, end - 1, "value")], self.lambdas(i, end), set())

    def lambdas(self, first, last):
        """The bodies of lambda functions in an expression, in which there are statements, too"""
        found = []
        for i in range(first + 1, last):
            opens = self.t[i] == "{" and self.t[i - 1] == ")" and self.t[self.other[i - 1] - 1] == "]"
            if opens or (self.t[i] == "{" and self.t[i - 1] == "]"):
                found.append(Block(i + 1, self.other[i], True, self.statements(i + 1, self.other[i])))
        return found

    def statements(self, i, end):
        found = []
        while i < end:
            found.append(self.statement(i))
            if found[-1].kind == "label":
                found[-1] = found[-1]._replace(first=i)
            i = found[-1].last
        if i != end:
            raise ValueError("a statement is not whole")
        return found


# ---------------------------------------------------------------- faults
Fault = collections.namedtuple("Fault", "number when name build group expected hunks")
Hunk = collections.namedtuple("Hunk", "file place old new")
Edit = collections.namedtuple("Edit", "first last text") # the tokens from first to last become a text


def read_faults(path):
    """A fault is `fault NAME` or `more NAME`, a line `BUILD GROUP: EXPECTED`, and changes: `@@ FILE FUNCTION`, then
    lines that begin with `-`, `+` or a space, as in a diff."""
    faults = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        line = line.rstrip("\n")
        head = re.match(r"(fault|more) (.*)", line)
        test = re.match(r"  (\S+) ([^:]+(?::[^ :]+)?): (.*)", line)
        if head:
            faults.append(Fault(len(faults) + 1, head[1], head[2], "", "", "", []))
        elif line.startswith("@@ "):
            faults[-1].hunks.append(Hunk(*line[3:].split(), [], []))
        elif line[:1] in ("-", "+", " ") and faults and faults[-1].hunks:
            for side in (faults[-1].hunks[-1].old,) * (line[0] != "+") + (faults[-1].hunks[-1].new,) * (line[0] != "-"):
                side.append(line[1:])
        elif test and faults and test[1] in BUILDS:
            faults[-1] = faults[-1]._replace(build=test[1], group=test[2], expected=test[3])
        elif line and not line.startswith("#"):
            sys.exit(f"{path}:{number}: expected fault, more, BUILD GROUP: EXPECTED, @@, -, + or a space: {line}")
    for f in faults:
        if not f.build or not f.hunks:
            sys.exit(f"{path}: {f.name}: the line BUILD GROUP: EXPECTED or the change is missing")
    return faults


class Source:
    """A file, and its places"""

    def __init__(self, folder, name):
        self.text = open(os.path.join(folder, name), encoding="utf-8").read()
        self.places = places(self.text)

    def find(self, hunk):
        """The place and the edit of a hunk; a ValueError if its tokens are not there exactly once."""
        old, new_text = texts(tokenize("\n".join(hunk.old))), "\n".join(hunk.new)
        new_tokens = tokenize(new_text)
        new, found = texts(new_tokens), []
        named = [p for p in self.places if p.name == hunk.place]
        for p in named:
            all_texts = texts(p.tokens)
            found += [(p, i) for i in range(len(all_texts) - len(old) + 1) if all_texts[i:i + len(old)] == old]
        if not named:
            raise ValueError(f"{hunk.file} has no {hunk.place}")
        if len(found) != 1 or not old:
            raise ValueError(f"in {hunk.place} of {hunk.file} these tokens are {len(found)} times, expected once: "
                             + " ".join(old))
        if old == new:
            raise ValueError(f"the edit of {hunk.place} changes nothing")
        p, at = found[0]
        before = next((i for i in range(min(len(old), len(new))) if old[i] != new[i]), min(len(old), len(new)))
        after = next((i for i in range(min(len(old), len(new)) - before) if old[-1 - i] != new[-1 - i]),
                     min(len(old), len(new)) - before)
        changed = new_tokens[before:len(new) - after]
        text = new_text[changed[0].start:changed[-1].end] if changed else ""
        return p, Edit(at + before, at + len(old) - after, text)


# ---------------------------------------------------------------- regions: what a branch surrounds
# kind: statements, value, condition or void; edits: all edits of this fault from token first to last
Region = collections.namedtuple("Region", "fault kind first last edits place block")


def replaced(source, tokens, first, last, edits):
    """The text of tokens from first to last with the edits made"""
    out, at = "", tokens[first].start if first < last else 0
    for e in sorted(edits):
        start = tokens[e.first].start if e.first < last else tokens[last - 1].end if first < last else at
        out += source.text[at:start] + " " + e.text + " "
        at = tokens[e.last - 1].end if e.last > e.first else start
    return out + (source.text[at:tokens[last - 1].end] if first < last else "")


def directives(tokens):
    return [t.text for t in tokens if t.text.startswith("#") and len(t.text) > 2]


def is_whole(source, place, first, last, edits, block):
    """Whether the tokens may become the two branches of an if: whole statements, old and new, that declare nothing which
    is used after them, and of which there may be two."""
    tokens = place.tokens[first:last]
    new = tokenize(replaced(source, place.tokens, first, last, edits))
    conditionals = [d for d in directives(tokens) if not re.match(r"#\s*pragma", d)]
    statics = [n.text for t, n in zip(tokens, tokens[1:]) if t.text == "static" and n.text != "const"]
    if (not block.braces and not (tokens and new)) or statics or "goto" in texts(tokens):
        return False
    if sum(d[1:].strip().startswith("if") for d in conditionals) * 2 > len(conditionals):
        return False
    try:
        statements = Parser(tokens).statements(0, len(tokens)) + Parser(new).statements(0, len(new))
    except ValueError:
        return False
    later = set(texts(place.tokens[last:block.last]))
    return not any(s.kind == "label" or s.names & later for s in statements)


def statement_region(source, place, edit, block):
    """The smallest statements of a block, or of a block within it, that an edit changes: (kind, first, last, block)"""
    for s in block.statements:
        for inner in s.blocks:
            if inner.first <= edit.first and edit.last <= inner.last:
                if region := statement_region(source, place, edit, inner):
                    return region
    holder = next((s for s in block.statements if s.first <= edit.first and edit.last <= s.last), None)
    if holder and (holder.kind == "declaration" or holder.blocks):
        if region := expression_region(source, place, edit, holder):
            return *region, block
    cuts = sorted({block.first, block.last}.union(*({s.first, s.last} for s in block.statements)))
    ranges = [(a, b) for a in cuts if a <= edit.first for b in cuts if edit.last <= b <= len(place.tokens)]
    for a, b in sorted(ranges, key=lambda r: (r[1] - r[0], -r[0])):
        if is_whole(source, place, a, b, [edit], block):
            return "statements", a, b, block
    return None


def expression_region(source, place, edit, holder):
    """The smallest expression of a declaration or of a head that an edit changes: (kind, first, last)"""
    head = next((h for h in holder.heads if h[0] <= edit.first and edit.last <= h[1]), None)
    if not head or head[2] == "constant" or {"static", "constexpr"} & set(texts(place.tokens[head[0]:head[1]])):
        return None
    parser = Parser(place.tokens[head[0]:head[1]])
    t, other, base = parser.t, parser.other, head[0]
    low, high = edit.first - base, edit.last - base
    levels = [(0, head[1] - base)] # between the brackets around the edit, from outside in
    if head[2] == "value":
        levels += sorted((i + 1, other[i]) for i in other if t[i] in OPEN and i < low and high <= other[i])
    declares = holder.kind == "declaration" or parser.is_declaration(0)
    for first, last in reversed(levels):
        a, b, i = first, last, first
        while i < last:
            if t[i] in OPEN and not (i < low and high <= other[i]):
                i = other[i]
            elif t[i] in ("=", ",") and head[2] == "value":
                a, b = (i + 1, b) if i < low else (a, min(b, i) if i >= high else b)
            i += 1
        is_type = (first == 0 and a == 0 and declares) or (first > 0 and t[first - 1] == "[" and declares)
        new = tokenize(replaced(source, place.tokens, a + base, b + base, [edit]))
        if a < b and t[a] != "{" and not is_type and is_expression(new):
            return head[2], a + base, b + base
    return None


def is_expression(tokens):
    try:
        partner(tokens)
    except ValueError:
        return False
    return bool(tokens) and not directives(tokens) and not {";", "if", "for", "return"} & set(texts(tokens))


def region_of(source, fault, place, edit):
    """The region of an edit, or the reason why it cannot be a branch"""
    if place.body is None or edit.first < place.body:
        return f"{place.name} is no function" if place.body is None else f"it changes the signature of {place.name}"
    last = len(place.tokens) - (place.body > 0)
    tokens = place.tokens + [Token(";", -1, -1)] * (place.body == 0) # which stands behind the macro's name
    try:
        block = Block(place.body, len(tokens) - 1, False, Parser(tokens).statements(place.body, len(tokens) - (place.body > 0)))
        found = statement_region(source, place, edit, block._replace(braces=place.body > 0))
    except ValueError as why:
        return f"{place.name} cannot be read: {why}"
    if not found and place.body == 0:
        found = expression_region(source, place, edit, Statement("value", 0, last, [(0, last, "value")], [], set()))
        found = found and (*found, None)
    if not found:
        return f"no statement or expression of {place.name} can be a branch"
    return Region(fault, *found[:3], [edit], place, found[3])


def joined(source, regions, alone):
    """Overlapping regions of one fault become one. Two that overlap in part are widened to the same statements."""
    done = []
    for r in sorted(regions, key=lambda r: (r.place.tokens[0].start, r.first, -r.last)):
        for i, d in enumerate(done):
            overlap = d.place.tokens is r.place.tokens and r.first < d.last and d.first < r.last
            if overlap and d.fault == r.fault and r.last <= d.last:
                done[i] = d._replace(edits=d.edits + r.edits)
                break
            if overlap and r.last > d.last:
                wide = [x._replace(first=d.first, last=r.last, block=d.block) for x in (d, r)]
                if not all(is_whole(source, x.place, x.first, x.last, x.edits, x.block) for x in wide):
                    alone[r.fault] = f"its statements overlap those of fault {d.fault}"
                    return joined(source, [x for x in regions if x.fault != r.fault], alone)
                return joined(source, [x for x in regions if x is not r and x is not d and x not in done[i:i + 1]] + wide,
                              alone)
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


def span(source, r):
    tokens = r.place.tokens
    start = tokens[r.first].start if r.first < len(tokens) else tokens[-1].end
    end = tokens[r.last - 1].end if r.last > r.first else start
    newline = "\n" if directives(tokens[r.first:r.last]) else " "
    return start, end, r.fault, r.kind, replaced(source, tokens, r.first, r.last, r.edits), newline


# ---------------------------------------------------------------- commands
def plant(faults, build, folder):
    """Changes the files in a folder. Returns {number: reason} of the faults that cannot be branches."""
    sources, alone, found = {}, {}, collections.defaultdict(list)
    for f in (f for f in faults if f.build == build):
        for h in f.hunks:
            source = sources.setdefault(h.file, Source(folder, h.file))
            region = region_of(source, f.number, *source.find(h))
            if isinstance(region, str):
                alone[f.number] = region
            else:
                found[h.file].append(region)
    for file, regions in found.items():
        found[file] = joined(sources[file], [r for r in regions if r.fault not in alone], alone)
    for file, regions in found.items():
        spans = [span(sources[file], r) for r in regions if r.fault not in alone]
        spans.sort(key=lambda s: (s[0], s[1] > s[0], -s[1]))
        text = sources[file].text
        with open(os.path.join(folder, file), "w", encoding="utf-8") as f:
            f.write(branches(text, 0, len(text), spans))
    return alone


def apply(fault, folder):
    """Makes the edits of one fault as they are, without a branch."""
    for h in fault.hunks:
        source = Source(folder, h.file)
        place, e = source.find(h)
        t, text = place.tokens, source.text
        start = t[e.first].start if e.first < len(t) else t[-1].end
        end = t[e.last - 1].end if e.last > e.first else start
        indent = re.search(r"[ ]*$", text[:start])[0]
        gap = "" if e.last > e.first or not e.text else "\n" + indent if e.text[-1] in ";}" else " "
        with open(os.path.join(folder, h.file), "w", encoding="utf-8") as f:
            f.write(text[:start] + e.text + gap + text[end:])


def check(faults):
    lost = 0
    for f in faults:
        for h in f.hunks:
            try:
                Source(".", h.file).find(h)
            except (ValueError, OSError) as why:
                print(f"{f.name}: {why}")
                lost += 1
                break
    print(f"{len(faults) - lost} of {len(faults)} planted faults match")
    return lost > 0


def main(command, path, *arguments):
    faults = read_faults(path)
    if command == "check":
        return check(faults)
    if command == "list":
        for f in faults:
            print(*f[:-1], sep="\t")
    elif command == "apply":
        apply(faults[int(arguments[0]) - 1], arguments[1])
    elif command == "plant":
        for number, reason in sorted(plant(faults, *arguments).items()):
            print(f"{number}\t{reason}")
    else:
        sys.exit(f"plant.py was given '{command}'; expected check, list, apply or plant")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
