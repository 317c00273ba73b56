"""Names as calls: on the command line drafters and trees are written as Python would call them.

    call = read_call("pct(width=7, leaf=0)", {"pct": pct.pct}, "tree")
    call.function(expand, root, **call.settings)

Settings are Python literals; their names are the function's.  A function that takes *names, say of
the models of a cascade, gets them without quotes: "cascade(google/flan-t5-base, k=5)".
"""
import ast
import inspect
import re
from collections import namedtuple

from runtime.program import UserError

# words: the names that are given.  settings: {name: value}.  label: the call as it was written
Call = namedtuple("Call", "name function words settings label")

def read_call(text, functions, what):
    """"pct(width=7)" -> Call.  functions: {name: function}; what: "tree", as an error calls it."""
    name, bracket, inside = text.strip().partition("(")
    name = name.strip().replace("_", "-")
    if name not in functions:
        raise UserError(f"there is no {what} called {name!r}: choose among {' '.join(functions)}")
    parameters = inspect.signature(functions[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    defaults |= getattr(functions[name], "keywords", {})               # of a functools.partial
    takes_words = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    words, settings = [], {}
    try:
        # At commas outside of brackets
        for argument in re.split(r",(?![^(\[]*[)\]])", inside.removesuffix(")")):
            key, equals, value = argument.strip().partition("=")
            if equals:
                settings[key.strip()] = ast.literal_eval(value.strip())
            elif key:
                words.append(key.strip("'\""))
        is_closed = inside.endswith(")") == bool(bracket)
        if not is_closed or settings.keys() - defaults.keys() or words and not takes_words:
            raise ValueError
    except (SyntaxError, ValueError):
        takes = ["names"] if takes_words else []
        takes += [f"{key}={value!r}" for key, value in defaults.items()]
        raise UserError(f"{text}: {name} takes {', '.join(takes) or 'no settings'}") from None
    return Call(name, functions[name], words, settings, text.strip())
