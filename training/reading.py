"""What was read of user-supplied files: counts by form and by reason, and documents with marks."""
from collections import Counter

import numpy as np

from runtime import text

PLACES = 3          # of rows that were left out for one reason, which are named
NAMED = 12          # reasons and fields that are named, the most frequent ones
SHOWN = 600         # characters of a run of tokens that are shown, at most

class Report:
    """Counts of rows: by the form they were read in, and by the reason why they were left out."""

    def __init__(self):
        self.forms, self.unread, self.in_part, self.left_out = {}, {}, {}, {}

    def read(self, document, parts):
        """Count a row that was read, and the tokens of its parts."""
        counts = self.forms.setdefault(document.form, Counter())
        counts["rows"] += 1
        counts["tokens"] += sum(len(ids) for ids in parts)
        counts["learned"] += sum(int((ids >= 0).sum()) for ids in parts)
        unread = set(document.row) - {*document.form.split(" + "), *text.KINDS, "held_out"}
        self.unread.setdefault(document.form, set()).update(unread)

        if document.note:
            self.count(self.in_part, document.note, document.place)

    def leave_out(self, why, document):
        """Count a row that was left out."""
        self.count(self.left_out, str(why), document.place)

    def count(self, counts, why, place):
        """Count one more row for a reason, in {reason: [rows, [places of the first]]}"""
        count = counts.setdefault(why, [0, []])
        count[0] += 1
        count[1] += [place] if count[0] <= PLACES else []

    def lines(self):
        """What was counted, line by line."""
        lines = []
        for form, counts in self.forms.items():
            unread = ", ".join(sorted(self.unread[form])[:NAMED])
            lines.append("{rows:7d} read as {form}: {learned} of {tokens} tokens are learned{end}"
                         .format(**counts, form=form, end=f"; not read: {unread}" * bool(unread)))
        for what, counts in (("read without", self.in_part), ("left out:", self.left_out)):
            reasons = sorted(counts.items(), key=lambda count: -count[1][0])
            for why, (rows, places) in reasons[:NAMED]:
                first = ", ".join(places) + ", ..." * (rows > PLACES)
                lines.append(f"{rows:7d} {what} {why} ({first})")
            if reasons[NAMED:]:
                rows = sum(rows for _, (rows, _) in reasons[NAMED:])
                lines.append(f"{rows:7d} {what} {len(reasons) - NAMED} other reasons")
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
