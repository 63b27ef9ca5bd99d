"""An agent that answers a question from a folder of documents, with citations. No model, no network.

The documents are Python modules, and what it reads of them is what they say of themselves: their docstrings. Without a
folder of yours, that is the standard library of the interpreter that runs this.

    python examples/research_agent.py "How are threads and processes started, and how do they wait for one another?"

It looks for the documents that have most of the words of the question (the plan), reads them one by one, notes what
bears on the question as discoveries, follows what they refer to (another plan), decides what to cite, and saves a
report. Kill it at any moment and start it again: it goes on at the step where it stood. Each call of a tool has its
price, a line in a ledger. None is paid twice: the tools are risky steps, and ask the ledger whether they were paid for.
Asked the same question again, it knows that it has answered it.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure import Agent, AgentState, AlreadyDone, App, Context, PlanStep, Retry, Worker, current_step
from pydantic import BaseModel, Field

app = App("research")

_COMMON: Final = frozenset(
    [
        "about",
        "after",
        "also",
        "another",
        "been",
        "before",
        "between",
        "both",
        "could",
        "does",
        "done",
        "each",
        "from",
        "have",
        "here",
        "into",
        "more",
        "most",
        "must",
        "only",
        "other",
        "same",
        "should",
        "some",
        "such",
        "than",
        "that",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "through",
        "under",
        "used",
        "uses",
        "using",
        "very",
        "were",
        "what",
        "when",
        "where",
        "which",
        "while",
        "will",
        "with",
        "without",
        "would",
        "your",
    ]
)
_ENDING: Final = re.compile(r"(?<=\w{4})(ing|es|ed|(?<!s)s)$")
_LONGEST: Final = 400
"""Characters of a passage that is noted."""


class Passage(BaseModel):
    """A paragraph that bears on the question. words: those of the question that it has."""

    document: str
    line: int
    text: str
    words: list[str]


class Notes(AgentState):
    """folder: of the documents. documents: how many are read, those that others refer to besides. ledger: the file in
    which every paid call of a tool is a line. pause: seconds that a call takes once it is paid, as a slow tool would.
    """

    folder: Path = Path(sysconfig.get_path("stdlib"))
    documents: int = 6
    ledger: Path | None = None
    pause: float = 0.0
    words: list[str] = Field(default_factory=list)
    passages: list[Passage] = Field(default_factory=list)
    followed: list[str] = Field(default_factory=list)


class Report(BaseModel):
    """artifact: the hash of the report's bytes."""

    artifact: str
    documents: int
    passages: int
    cited: int


# the documents


class Text(NamedTuple):
    """What a document says, and on which line it begins."""

    line: int
    text: str


def documents_in(folder: Path) -> dict[str, Path]:
    """Modules and packages, by name; private ones are not documents."""
    found = {path.stem: path for path in folder.glob("*.py")} | {
        path.parent.name: path for path in folder.glob("*/__init__.py")
    }
    return {name: found[name] for name in sorted(found) if not name.startswith("_")}


def text_of(path: Path) -> Text:
    """The docstring of a module, without running or compiling it."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.STRING:
                return Text(token.start[0], str(ast.literal_eval(token.string)))
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING):
                break
    return Text(1, "")


def words_of(text: str) -> Counter[str]:
    """Words that mean something, without their endings, in their order, and how often they are said."""
    said = [word for word in re.findall(r"[a-z]{4,}", text.lower()) if word not in _COMMON]
    return Counter(_ENDING.sub("", word) for word in said)


# the tools: each call is paid for


class Tools:
    """What the agent can do in the world. A call is paid for when its line is in the ledger, whoever asks."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def search(self, words: list[str]) -> list[str]:
        """The names of the documents that have most of the words, and most often, the best first."""
        self._pay("search", " ".join(words))
        return self.ranking(words)

    def ranking(self, words: list[str]) -> list[str]:
        ranks: dict[str, tuple[int, int]] = {}
        for name, path in documents_in(self._notes.folder).items():
            said = words_of(text_of(path).text)
            counts = [said[word] for word in words if word in said]
            ranks[name] = (-len(counts), -sum(counts))
        return [name for name in sorted(ranks, key=lambda name: (ranks[name], name)) if any(ranks[name])]

    def read(self, name: str) -> list[Passage]:
        """The paragraphs of a document that have any of the words."""
        self._pay("read", name)
        return self.passages(name)

    def passages(self, name: str) -> list[Passage]:
        line, text = text_of(documents_in(self._notes.folder)[name])
        found = []
        for paragraph in re.split(r"\n\s*\n", text):
            words = [word for word in words_of(paragraph) if word in self._notes.words]
            if words:
                at = line + text[: text.index(paragraph)].count("\n")
                shown = " ".join(paragraph.split())[:_LONGEST]
                found.append(Passage(document=name, line=at, text=shown, words=words))
        return found

    def paid(self, unpaid: Callable[..., Any]) -> Callable[..., AlreadyDone[Any] | None]:
        """For a call that was begun and has no record: where it was paid for, its answer costs nothing more."""

        def verify(*args: Any) -> AlreadyDone[Any] | None:
            return AlreadyDone(unpaid(*args)) if self._is_paid(current_step().idempotency_key) else None

        return verify

    def _pay(self, tool: str, what: str) -> None:
        if self._notes.ledger is not None:
            with self._notes.ledger.open("a", encoding="utf-8") as ledger:
                ledger.write(f"{current_step().idempotency_key} {tool} {what}\n")
        time.sleep(self._notes.pause)

    def _is_paid(self, key: str) -> bool:
        ledger = self._notes.ledger
        if ledger is None or not ledger.exists():
            return False
        return any(line.startswith(f"{key} ") for line in ledger.read_text(encoding="utf-8").splitlines())


# the agent


class Research(Agent[Notes]):
    """Answers its goal, a question, from documents."""

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        tools = Tools(state)
        state.words = list(words_of(state.goal))
        names = await ctx.tool(
            "search",
            tools.search,
            state.words,
            reasoning="what has most of the words of the question is read first",
            risky=True,
            verify=tools.paid(tools.ranking),
        )
        chosen, left = names[: state.documents], names[state.documents :]
        await ctx.decide(f"read {', '.join(chosen)}", reasoning="most of the words asked for", alternatives=left[:5])
        return [*map(reading, chosen), PlanStep(key="write", title="write the report")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> Any:
        if step.key == "write":
            return await self.write(ctx, state)
        return await self.read(ctx, state, step.arguments["document"])

    async def read(self, ctx: Context, state: Notes, name: str) -> int:
        """Note what a document says of the question."""
        tools = Tools(state)
        found = await ctx.tool("read", tools.read, name, risky=True, verify=tools.paid(tools.passages))
        for one in found:
            await ctx.discover(one.text, source=place(one))
        state.passages += found
        return len(found)

    async def replan(self, ctx: Context, state: Notes) -> list[PlanStep] | None:
        """Once all that was planned is read: follow the documents to one that they refer to by name."""
        still = [step for step in state.plan if step.status == "pending"]
        if state.followed or [step.key for step in still] != ["write"]:
            return None
        read = {one.document for one in state.passages}
        known = documents_in(state.folder)
        named = Counter(name for one in state.passages for name in re.findall(r"[a-z_]{4,}", one.text) if name in known)
        state.followed = [name for name, _ in named.most_common() if name not in read][:2]
        if not state.followed:
            return None
        await ctx.decide(f"read {', '.join(state.followed)} too", reasoning="what was read refers to them")
        return [*map(reading, state.followed), *still]

    async def write(self, ctx: Context, state: Notes) -> dict[str, Any]:
        """Decide what to cite, and save the report."""
        best = sorted(state.passages, key=lambda one: (-len(one.words), one.document, one.line))
        cited = best[: state.documents * 2]
        left = [place(one) for one in best[len(cited) :]]
        await ctx.decide(
            f"cite {len(cited)} of {len(best)} passages",
            reasoning="they have most of the words of the question",
            alternatives=left[:5],
        )
        saved = await ctx.artifacts.save("report.md", report(state, cited), media_type="text/markdown")
        return {"artifact": saved.hash, "cited": len(cited)}

    async def finish(self, ctx: Context, state: Notes) -> Report:
        read = [step for step in state.plan if step.key != "write"]
        return Report(documents=len(read), passages=len(state.passages), **state.results["write"])


research = app.agent(Research, retry=Retry(max_attempts=3, max_crashes=20))


def reading(name: str) -> PlanStep:
    """The step that reads a document."""
    return PlanStep(key=f"read-{name}", title=f"read {name}", arguments={"document": name})


def place(one: Passage) -> str:
    return f"{one.document}:{one.line}"


def report(state: Notes, cited: list[Passage]) -> str:
    """The answer, in Markdown: what was found for each word of the question, and where."""
    numbers = {place(one): number for number, one in enumerate(cited, 1)}
    lines = [f"# {state.goal}", ""]
    for word in state.words:
        saying = [f"[{numbers[place(one)]}]" for one in cited if word in one.words]
        lines.append(f"- **{word}**: {' '.join(saying) or 'nothing of what was read says anything about it'}")
    lines += ["", "## What was found", ""]
    lines += [f"{numbers[place(one)]}. {one.text} ({place(one)})" for one in cited]
    return "\n".join([*lines, ""])


async def main() -> None:
    question = " ".join(sys.argv[1:]) or "How are threads and processes started, and how do they wait for one another?"
    async with app:
        handle = await research.enqueue(question)
        async with Worker(app) as worker:
            await worker.run(burst=True)
        found = await handle.result(timeout=60)
        sys.stdout.write(f"task {handle.id}\n{found.model_dump_json(indent=1)}\n")


if __name__ == "__main__":
    asyncio.run(main())
