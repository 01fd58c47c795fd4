"""Grammars in EBNF, as Lark's notation.

EBNF here is what llama.cpp calls GBNF: rules `name ::= ...` of literals, character classes, groups, alternatives and
repetitions, that start at `root`. What other writers of EBNF expect is understood as well: single quotes, comments in
`(* *)` and `/* */`, rules over several lines, and a first rule of another name to start at.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

TOKEN = re.compile(
    r"""
      "(?P<double>(?:\\.|[^"\\])*)"
    | '(?P<single>(?:\\.|[^'\\])*)'
    | \[(?P<negation>\^?)(?P<members>(?:\\.|[^\]\\])*)\]
    | (?P<space>\s+|\#[^\n]*|\(\*.*?\*\)|/\*.*?\*/)
    | (?P<rule>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | (?P<any>\.)
    """,
    re.VERBOSE | re.DOTALL,
)
CHARACTER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<letter>.)|(?P<plain>.)",
    re.DOTALL,
)
LETTERS = {"n": "\n", "r": "\r", "t": "\t"} | {letter: letter for letter in "\\\"'[]^-/"}
LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*(\[[^\]]*\])?\s*:(?!:=))", re.MULTILINE)
# llguidance's converter goes through all rules up to once for each rule: this takes it a second or two.
MAX_RULES_TIMES_CHARACTERS = 8_000_000
ANY_CHARACTER = "[\\x00-\U0010ffff]"


def is_ebnf(text: str) -> bool:
    """Whether `text` defines a rule with `::=` and none as Lark's notation does."""
    return not LARK.search(text) and any(token.lastgroup == "rule" for token in TOKEN.finditer(text))


def ebnf_to_lark(text: str) -> str:
    """The grammar in Lark's notation. Raises ValueError, with the reason, for one that makes no sense."""
    rules = [token["rule"] for token in TOKEN.finditer(text) if token["rule"]]
    if len(rules) * len(text) > MAX_RULES_TIMES_CHARACTERS:
        raise ValueError(f"{len(rules)} rules in {len(text)} characters are too many to convert from EBNF")
    # llguidance's converter starts at `root`, which it calls `start` in Lark.
    renamed = {} if "root" in rules else {rules[0]: "root"}
    if "start" in rules and "start" not in renamed:
        renamed["start"] = "start-rule"
    try:
        return gbnf_to_lark(TOKEN.sub(lambda token: _plain(token, renamed), text).strip())
    except ValueError:
        raise
    except Exception as error:  # the converter raises the bare class
        deep = isinstance(error, RecursionError)
        raise ValueError("its groups are nested too deep" if deep else str(error)) from error


def _plain(token: re.Match[str], renamed: dict[str, str]) -> str:
    """A token in the subset that llguidance's converter renders faithfully."""
    if token["rule"]:
        return f"\n{renamed.get(token['rule'], token['rule'])} ::= "
    if token["name"]:
        return renamed.get(token["name"], token["name"])
    if token["space"]:
        return " "
    if token["any"]:
        return ANY_CHARACTER
    if token["members"] is not None:
        members = "".join(
            "-" if character[0] == "-" else _in_class(_character(character))
            for character in CHARACTER.finditer(token["members"])
        )
        return f"[{token['negation']}{members}]"
    literal = token["double"] if token["double"] is not None else token["single"]
    return '"' + "".join(_in_literal(_character(character)) for character in CHARACTER.finditer(literal)) + '"'


def _character(match: re.Match[str]) -> str:
    """What a character or an escape of it stands for."""
    code = match["x"] or match["u"] or match["U"]
    if code:
        try:
            character = chr(int(code, 16))
            character.encode()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{match[0]} is no Unicode character") from error
        return character
    if match["letter"]:
        if match["letter"] not in LETTERS:
            raise ValueError(f"{match[0]} is an unknown escape")
        return LETTERS[match["letter"]]
    return match["plain"]


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() or not character.isascii() else f"\\x{ord(character):02x}"


def _in_class(character: str) -> str:
    """Every mark is escaped: several mean something in classes of the regular expressions that come of it."""
    return character if character.isalnum() or not character.isascii() else f"\\x{ord(character):02x}"
