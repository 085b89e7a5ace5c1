"""docs/troubleshooting.md: each sentence of percore has its entry, and each entry is a part of a sentence."""

import ast
import re
from typing import Final

import percore
from tests.contract.test_sentences import SENTENCES, SOURCE, sentence_of
from tests.docs.blocks import DOCS

GAP: Final = "…"
HEADINGS: Final = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
ENTRIES: Final = re.findall(r"`([^`]+)`", "\n".join(HEADINGS))

SELF_EXPLAINING: Final = {
    "module … has no attribute …",
    "PERCORE_WITHOUT=… names something unknown; known are: …",
    "… must be a whole number, not …",
    "… must be …, not …",
    "… must be a number of seconds, not …",
    "… must be a positive number of seconds, not …",
    "… must be zero or more seconds, not …",
    "… must be callable, such as …=…, not …",
    "… must be a callable",
    "max_memory_per_worker must be a whole number of bytes, such as 512 * 2**20, not …",
    "window must be a whole number, not …",
    "window must be at least 1, not …",
    'progress must be True, "text" or a function of a percore.Progress, such as progress=print, not …',
    "rate must be a percore.Rate, as in percore.Rate(10, per=1), not …",
    "n must be a whole number of calls, not …: for fractions choose another time, as in Rate(1, per=2)",
    "set_rate is for one key, such as a host: key must not be None",
    "grace must be None or a number of seconds, not …",
    "grace must be None or a number of seconds, not nan",
    "listen may have … addresses, not …",
    "listen has … twice",
    'broken must be "worker" or "pool", not …',
    'mp_context must be a context, such as multiprocessing.get_context("spawn"), not …',
    "max_workers must be an integer",
    "max_workers must be greater than 0",
    "max_workers must be at most …",
    "max_tasks_per_child must be an integer",
    "max_tasks_per_child must be >= 1",
    "chunksize must be >= 1.",
    "buffersize must be an integer or None",
    "buffersize must be None or > 0",
    "--port is a number from 0 to 65535, not …",
    "a number of seconds from 0.1 to 3600, not …",
    "a number of samples from 1 to 1000, not …",
    "seed must be an int, not …",
    "times must be an int or None, not …",
    "times must be at least 1, not …",
    "error must be an exception or its class, not …",
    "this start failed on purpose, by percore.testing",
    "deaths must be a number of deaths in a second, 0 or more, not …",
    "the runner has workers 0 to …, and no worker …",
    "worker … has died, and its replacement has not started",
    "dashboard(...) takes a Runner or a function that returns one, not …",
    "percore.web needs prometheus-client: pip install percore[web]",
}
"""Sentences without an entry: they say which argument is wrong, and what it must be."""

INSIDE: Final = {
    "%s has read nothing for %s s: %s": "each obstacle has an entry",
    "%s goes on, after %s s": "it ends what the message before it says, which has an entry",
    "the event loop goes on, after %s s": "likewise",
    "the workers (%d) are ready after %s s": "all is as it should be",
    "%s is ready after %s s, as number %d of its slot": "likewise",
    "%s starts, as number %d of its slot": "likewise",
    "%s has ended after %s s; calls done: %d, failed: %d": "likewise",
    "the workers have ended after %s s; calls done: %d, failed: %d, retried: %d; workers replaced: %d": "likewise",
    "this launcher is closed": "a mistake of percore's own",
    "could not start the thread that waits for a worker": "what follows is `worker … could not be started`",
    "a log record of … bytes": "percore cuts a record before it is too large",
    "a message (…) of … bytes: the largest that fits into the ring has …": "percore makes no message of that size",
    "… … …. …": "the sentence of WorkerDied, whose parts have entries",
    "there is no room for another pickle of … bytes": "only the host of a node keeps pickles of another store",
    "node … cannot tell: …": "the text ends with the reason, which the node's system gives",
    "listen=... needs workers on this machine: other nodes cannot have its sockets. Let each worker open a server of its own "
    "in its lifespan, and put a load balancer before them": "it says what to do",
    "percore top cannot show this runner: its page could not be written: %s": "at DEBUG; `percore top` says what it does not find",
    "percore top cannot show what workers on nodes use: %s": "at DEBUG; calls go on, and the columns are empty",
    "the channel of worker %d broke": "a mistake of percore's own",
    "… raised …": "the first part has an entry: `retry_on or backoff`",
}
"""Sentences without an entry that no user meets as such, and why."""


def found_in(entry: str, sentence: str) -> bool:
    """Whether the parts of an entry are in a sentence, in their order. An entry of one word stands for the whole sentence."""
    sentence = re.sub(r"%[srd]", GAP, sentence)
    if len(entry.replace(GAP, "").split()) == 1:
        return entry == sentence
    end = 0
    for part in entry.split(GAP):
        at = sentence.find(part, end)
        if at < 0:
            return False
        end = at + len(part)
    return True


def texts_of_source() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return {text for node in nodes if (text := sentence_of(node, {}))}


def test_each_sentence_has_an_entry_or_explains_itself() -> None:
    missing = {one for one in SENTENCES if not any(found_in(entry, one) for entry in ENTRIES)}
    assert missing == SELF_EXPLAINING | INSIDE.keys()


def test_each_entry_is_a_part_of_a_sentence() -> None:
    texts = texts_of_source()
    strangers = [entry for entry in ENTRIES if entry not in percore.__all__ and not any(found_in(entry, text) for text in texts)]
    assert not strangers
    assert len(ENTRIES) == len(set(ENTRIES)) > 80
