"""Names as calls: on the command line drafters and trees are written as Python would call them.

    call = read_call("pct(width=7, leaf=0)", {"pct": pct.pct}, "tree")
    call.function(expand, root, **call.settings)

Settings are Python literals, and their names and defaults are those of the function.  Words are
names of models, and may hold slashes, dots and dashes: "cascade(google/flan-t5-base, k=5)".
"""
import ast
import inspect
import re
from collections import namedtuple

import torch

from verify import UserError

# What the words in a call name
NAMED = {
    "cascade": "names of models, the largest first",
    "beside": "a neural drafter or a language model, then maxgram",
}
# words: names of models; settings {name: value}; label: the call as tables show it
Call = namedtuple("Call", "name function words settings label")

def settings_of(function):
    """{setting: default} of a function that the command line can call."""
    found = {}
    for p in inspect.signature(function).parameters.values():
        if p.default is not p.empty and p.name != "generator":
            found[p.name] = p.default
    return found

def check_brackets(text):
    """Refuse a call with an open bracket."""
    for opening, closing in ("()", "[]"):
        open_ones = text.count(opening) - text.count(closing)
        if open_ones > 0:
            raise UserError(f"{text}: a closing bracket {closing} is missing")
        if open_ones < 0:
            raise UserError(f"{text}: an opening bracket {opening} is missing")

def split(inside):
    """The inside of a call's brackets -> (words, {setting: value}, arguments); None: no call."""
    # Commas separate the arguments, except within brackets.
    arguments = re.findall(r"(?:\([^)]*\)|\[[^]]*\]|[^,()[\]])+", inside)
    words, settings = [], {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            settings[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            words.append(argument)
    twice = len(words) + len(settings) < len(arguments)
    unread = any("=" in word.partition("(")[0] for word in words)
    return None if twice or unread else (words, settings, arguments)

def read_call(text, functions, what):
    """"pct(width=7)" -> Call("pct", pct.pct, [], {"width": 7}, "pct(width=7)").

    functions: {name: function}; what: "tree", as a mistake calls it.  Raises UserError.
    """
    check_brackets(text)
    written = re.sub(r"\s", "", text)
    name, bracket, inside = written.partition("(")
    name = name.replace("_", "-")
    if name not in functions:
        raise UserError(f"there is no {what} called {name!r}: choose among {' '.join(functions)}")
    takes = settings_of(functions[name])
    found = split(inside.removesuffix(")"))
    ends = inside.endswith(")") == bool(bracket)
    words, settings, arguments = found or ([], {}, [])
    known = settings.keys() <= takes.keys()
    if not found or not ends or not known or bool(words) != (name in NAMED):
        models = [NAMED[name]] if name in NAMED else []
        listed = ", ".join(models + [f"{key}={value!r}" for key, value in takes.items()])
        raise UserError(f"{text}: {name} takes {listed or 'no settings'}")
    label = f"{name}({', '.join(arguments)})" if arguments else name
    return Call(name, functions[name], words, settings, label)

def check_tree(tree, most):
    """Refuse the Call of a tree that cannot be built, or not with `most` nodes, the root included.

    It is built once, for a made-up drafter: each of `most` tokens is as likely everywhere.
    """
    def uniform(tokens, parents):
        assert len(parents) <= most, f"more than {most} nodes a depth"
        return torch.full((len(parents), most), 1 / most)
    try:
        made = tree.function(uniform, torch.tensor([0]), **tree.settings)
        nodes = len(made.tokens) - 1
        assert nodes < most, f"{nodes} nodes exceed the {most - 1} that fit"
    except Exception as why:
        said = str(why).partition("\n")[0]
        raise UserError(f"--tree {tree.label}: {said}") from None
