"""What was read of user-supplied files: counts by form and by reason, and documents with marks."""
from collections import Counter

import numpy as np

from runtime import text

PLACES = 3          # rows that are named for each reason
NAMED = 12          # reasons, and fields that are not read, that are named
SHOWN = 600         # characters of a run of tokens that are shown, at most

class Report:
    """Counts of rows: by the form they were read in, and by the reason why they were left out."""

    def __init__(self):
        self.forms = {}                  # {form: Counter of rows, tokens, learned tokens}
        self.unread = {}                 # {form: fields that its rows have beside}
        self.reasons = {}                # {reason: [places of rows]}

    def read(self, document, parts):
        """Count a row that was read, and the tokens of its parts."""
        counts = self.forms.setdefault(document.form, Counter())
        counts["rows"] += 1
        counts["tokens"] += sum(len(ids) for ids in parts)
        counts["learned"] += sum(int((ids >= 0).sum()) for ids in parts)
        known = {*document.form.split(" + "), *text.KINDS, "held_out"}
        self.unread.setdefault(document.form, set()).update(set(document.row) - known)
        if document.note:
            self.reasons.setdefault(f"read without {document.note}", []).append(document.place)

    def leave_out(self, why, document):
        """Count a row that was left out."""
        self.reasons.setdefault(f"left out: {why}", []).append(document.place)

    def lines(self):
        """What was counted, line by line."""
        lines = []
        for form, counts in self.forms.items():
            line = ("{rows:7d} read as {form}: {learned} of {tokens} tokens are learned"
                    .format(**counts, form=form))
            unread = ", ".join(sorted(self.unread[form])[:NAMED])
            lines.append(f"{line}; not read: {unread}" if unread else line)
        reasons = sorted(self.reasons.items(), key=lambda reason: -len(reason[1]))
        for why, places in reasons[:NAMED]:
            first = ", ".join(places[:PLACES])
            dots = ", ..." if len(places) > PLACES else ""
            lines.append(f"{len(places):7d} {why} ({first}{dots})")
        others = [len(places) for _, places in reasons[NAMED:]]
        if others:
            lines.append(f"{sum(others):7d} for {len(others)} other reasons")
        return lines

def marked(ids, tokenizer):
    """A document as text, with the learned parts between brackets.  ids: as of chats.encode."""
    is_label = ids >= 0
    plain = np.where(is_label, ids, ~ids).tolist()
    ends = [*(np.flatnonzero(np.diff(is_label)) + 1), len(ids)]
    shown, start = "", 0
    for end in ends:
        # Decoded with all that comes before: some tokenizers drop the space of a first word.
        before = tokenizer.decode(plain[:start], clean_up_tokenization_spaces=False)
        run = tokenizer.decode(plain[:end], clean_up_tokenization_spaces=False)[len(before):]
        if len(run) > SHOWN:
            left_out = len(run) - SHOWN
            run = f"{run[:SHOWN // 2]}[... {left_out} characters ...]{run[-SHOWN // 2:]}"
        shown += f"⟦{run}⟧" if is_label[start] else run
        start = end
    return shown
