"""c_source.py: reads C, C++ and CUDA as far as plant.py needs it: tokens, the functions, tables and macros of a file,
and the statements of a function, without expanding macros. plant_test.py tests it."""
import collections
import re

# ---------------------------------------------------------------- tokens
Token = collections.namedtuple("Token", "text start end")
LEXEME = re.compile(r"""
    (?P<skip> \s+ | \\\n | //[^\n]* | /\*.*?\*/ )
  | (?P<directive> (?:(?<=\n)|^)[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])* )
  | (?P<token> (?:u8|[LuUR])?"(?:\\.|[^"\\])*" | [LuU]?'(?:\\.|[^'\\])*' | \.?[0-9](?:[eEpP][+-]|'[0-9]|[\w.])* | \w+
             | <<=|>>=|\.\.\.|<<<|>>>|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\#\#|. )
  """, re.X | re.S)


def tokenize(text, start=0, end=None):
    """The tokens of text[start:end]. A line of the preprocessor is one token."""
    matches, at = [], start
    end = len(text) if end is None else end
    while at < end:
        matches.append(LEXEME.match(text, at, end))
        at = matches[-1].end()
    return [Token(m[0], m.start(), m.end()) for m in matches if not m["skip"]]


def texts(tokens):
    return [t.text for t in tokens]


def directives(tokens):
    return [t.text.lstrip("# \t") for t in tokens if len(t.text) > 2 and t.text.lstrip()[0] == "#"]


OPEN = {"(": ")", "[": "]", "{": "}"}


def partners(tokens):
    """For each bracket the index of the one that belongs to it; a ValueError if they do not match"""
    other, stack = {}, []
    for i, t in enumerate(tokens):
        if t.text in OPEN:
            stack.append(i)
        elif t.text in OPEN.values():
            if not stack or OPEN[tokens[stack[-1]].text] != t.text:
                raise ValueError(f"'{t.text}' closes nothing")
            other[i] = stack.pop()
            other[other[i]] = i
    if stack:
        raise ValueError(f"'{tokens[stack[-1]].text}' is not closed")
    return other


def outside(other, first, last):
    """The indices from first to last that are not within brackets; of a pair of brackets the first one"""
    while first < last:
        yield first
        first = max(first, other.get(first, first)) + 1


# ---------------------------------------------------------------- functions, tables and macros of a file
# names: the name of a function or macro; all words of a table or type outside its braces, and the first one inside
# body: the index of the token after a function's opening brace; 0 in a macro; None in anything else
Place = collections.namedtuple("Place", "names tokens body")
NAME = re.compile(r"[A-Za-z_]\w*$")
ATTRIBUTES = {"__attribute__", "__launch_bounds__"}


def function_name(tokens, other, first, brace):
    """The name in `name(…) {`, or None if no function begins here"""
    i = brace - 1
    while i > first and tokens[i].text in {")", "const", "noexcept"} | ATTRIBUTES:
        if tokens[i].text == ")":
            i = other[i]
            if NAME.match(tokens[i - 1].text) and tokens[i - 1].text not in ATTRIBUTES:
                return tokens[i - 1].text
        i -= 1
    return None


def places(text):
    """All functions, tables, types and macros of a file"""
    tokens = tokenize(text)
    other, found, first, i = partners(tokens), [], 0, 0
    while i < len(tokens):
        t, end = tokens[i].text, max(i, other.get(i, i))
        name = function_name(tokens, other, first, i) if t == "{" else None
        if define := re.match(r"\s*#\s*define\s+(\w+)(\([^)]*\))?", t):
            found.append(Place({define[1]}, tokenize(text, tokens[i].start + define.end(), tokens[i].end), 0))
        if t == "{" and {"extern", "namespace"} & set(texts(tokens[max(0, i - 2):i])):
            end = i # what is inside belongs to the file
        elif name:
            found.append(Place({name}, tokens[first:end + 1], i + 1 - first))
        elif t == ";":
            outer = list(outside(other, first, i))
            words = {tokens[k].text for k in outer} | {tokens[k + 1].text for k in outer if tokens[k].text == "{"}
            found.append(Place(words, tokens[first:i + 1], None))
        if t in (";", "}") or name or (t == "{" and end == i) or directives(tokens[i:i + 1]):
            first = end + 1
        i = end + 1
    return found


# ---------------------------------------------------------------- statements
# first to last: its tokens; heads: (first, last, kind) of its expressions; blocks: those that it controls; names: what
# it declares
Statement = collections.namedtuple("Statement", "kind first last heads blocks names")
Block = collections.namedtuple("Block", "first last braces statements")
CONTROL = ("if", "for", "while", "switch", "do")
NO_TYPES = set("return goto break continue else delete new throw case default sizeof".split()).union(CONTROL)
# `type name` or `type *name`, or a first word that is a type's
DECLARATION = re.compile(r"""(?: (?:const|constexpr|static|enum|struct|union|unsigned|signed|auto|extern|volatile|using
    |typedef|alignas|_Alignas|_Thread_local|thread_local|__shared__|__attribute__)\ 
  | \w+\ (?: ::\ \w+\ )* (?:<\ (?:[^;{}]*?\ )?>\ )? (?:(?:\*|&|const|restrict|__restrict__)\ )* [A-Za-z_]\w*\ 
    [=;,[({:] )""", re.X)


class Parser:
    """The statements of a function's body; a ValueError if the tokens are not whole statements"""

    def __init__(self, tokens):
        self.t = texts(tokens) + ["", ""]
        self.other = partners(tokens)

    def is_name(self, i):
        return bool(NAME.match(self.t[i])) and self.t[i] not in NO_TYPES

    def is_declaration(self, i):
        return self.is_name(i) and bool(DECLARATION.match(" ".join(self.t[i:i + 60]) + " "))

    def names_of(self, first, last):
        """What a declaration declares: the names before an initializer, a comma or the end"""
        found, in_value = set(), False
        for i in outside(self.other, first, last):
            in_value = self.t[i] == "=" or (in_value and self.t[i] != ",")
            if not in_value and self.t[i + 1] in ("=", ";", ",", "[", "{"):
                found.add(self.t[i])
        return found

    def after_semicolon(self, first):
        for i in outside(self.other, first, len(self.t)):
            if self.t[i] in (";", "}", ""):
                break
        if self.t[i] != ";":
            raise ValueError(f"a statement ends with '{self.t[i]}'")
        return i + 1

    def parenthesis(self, i):
        if self.t[i] != "(":
            raise ValueError(f"'(' is missing before '{self.t[i]}'")
        return i + 1, self.other[i]

    def block(self, i):
        """What belongs to an if or a loop, and the index after it: a block in braces, or one statement"""
        if self.t[i] == "{":
            return Block(i + 1, self.other[i], True, self.statements(i + 1, self.other[i])), self.other[i] + 1
        s = self.statement(i)
        return Block(i, s.last, False, [s]), s.last

    def controlled(self, start):
        """if, for, while, switch, or a macro that is the head of a loop"""
        kind, is_constant = self.t[start], self.t[start + 1] == "constexpr"
        first, last = self.parenthesis(start + 1 + is_constant)
        heads = [(first, last, "condition" if kind in ("if", "while") else "value")] if not is_constant else []
        cuts = [i for i in outside(self.other, first, last) if self.t[i] == ";"]
        if len(cuts) == 2:
            heads = [(first, cuts[0], "value"), (cuts[0] + 1, cuts[1], "condition"), (cuts[1] + 1, last, "void")]
        block, end = self.block(last + 1)
        blocks = [block]
        if kind == "if" and self.t[end] == "else":
            block, end = self.block(end + 1)
            blocks.append(block)
        return Statement(kind, start, end, heads, blocks, set())

    def statement(self, i):
        t, after = self.t[i], self.t[i + 1]
        if t == "{":
            block, end = self.block(i)
            return Statement("block", i, end, [], [block], set())
        if t.lstrip().startswith("#"):
            if not re.match(r"\s*#\s*pragma", t):
                return Statement("directive", i, i + 1, [], [], set())
            return self.statement(i + 1)._replace(first=i, heads=[]) # a pragma is a part of the statement after it
        if self.is_name(i) and after in CONTROL: # a macro for such a pragma
            return self.statement(i + 1)._replace(first=i)
        if t == "do":
            block, end = self.block(i + 1)
            head = (*self.parenthesis(end + 1), "condition")
            return Statement("do", i, self.after_semicolon(head[1] + 1), [head], [block], set())
        if t in ("case", "default") or (self.is_name(i) and after == ":"):
            return Statement("label", i, self.t.index(":", i) + 1, [], [], set())
        calls = self.is_name(i) and after == "(" and self.t[self.other[i + 1] + 1]
        is_declaration = self.is_declaration(i)
        if t in CONTROL or (calls and not is_declaration and (calls == "{" or NAME.match(calls))):
            return self.controlled(i)
        end = self.after_semicolon(i)
        names = self.names_of(i, end) if is_declaration else set()
        return Statement("declaration" if is_declaration else "expression", i, end, [(i, end - 1, "value")], [], names)

    def statements(self, i, end):
        found = []
        while i < end:
            found.append(self.statement(i))
            i = found[-1].last
        if i != end:
            raise ValueError("a statement is not whole")
        return found
