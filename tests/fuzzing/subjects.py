"""All parsers to fuzz, by name."""

from fuzzing.front_end import front_end
from fuzzing.mutation import Subject
from fuzzing.rows import journal
from fuzzing.texts import cassette, checkpoint, policy
from fuzzing.wire import inbox_pages, reply, webhook

SUBJECTS: dict[str, Subject] = {
    "checkpoint": checkpoint,
    "journal": journal,
    "policy": policy,
    "cassette": cassette,
    "reply": reply,
    "webhook": webhook,
    "inbox": inbox_pages,
    "front_end": front_end,
}
