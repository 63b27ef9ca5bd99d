"""An agent that answers a question from a folder of documents, with citations. It needs no model and no network.

The documents are the docstrings of Python modules, by default those of the standard library.

    python examples/research_agent.py "How are threads and processes started, and how do they wait for one another?"

The plan is a list of documents to read, those with the most words of the question. Each step reads one and stores
matching paragraphs as discoveries. `replan` adds documents that the others refer to. The last step decides what to cite
and saves a report.

Kill the process at any moment and start it again: it resumes at the current step. Each tool call costs money here, a
line in a ledger. No call is paid twice, because the tools are risky steps whose `verify` reads the ledger. The agent
answers a question once: asking it again returns the stored result.
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
    re.findall(
        r"\w+",
        """about after also another been before between both could does done each from have here into more most must
        only other same should some such than that their them then there these they this those through under used uses
        using very were what when where which while will with without would your""",
    )
)
"""Words that do not tell documents apart."""

_ENDING: Final = re.compile(r"(?<=\w{4})(ing|es|ed|(?<!s)s)$")
"""Endings that are removed from words."""

_MAX_PASSAGE: Final = 400
"""Most characters of a stored passage."""


class Passage(BaseModel):
    """A paragraph that contains `words` of the question."""

    document: str
    line: int
    text: str
    words: list[str]


class Notes(AgentState):
    """The state of the agent; the first four fields are its inputs.

    Attributes:
        folder: the folder of the documents.
        documents: how many documents to read, without those that others refer to.
        ledger: a file with one line per paid tool call.
        pause: seconds that a tool call takes after it is paid.
    """

    folder: Path = Path(sysconfig.get_path("stdlib"))
    documents: int = 6
    ledger: Path | None = None
    pause: float = 0.0
    words: list[str] = Field(default_factory=list)
    passages: list[Passage] = Field(default_factory=list)
    followed: list[str] = Field(default_factory=list)


class Report(BaseModel):
    """The result: the artifact hash of the report, and what it is based on."""

    artifact: str
    documents: int
    passages: int
    cited: int


# Documents


class Text(NamedTuple):
    """The text of a document, and its first line."""

    line: int
    text: str


def documents_in(folder: Path) -> dict[str, Path]:
    """Return the public modules and packages of a folder by name."""
    found = {path.stem: path for path in folder.glob("*.py")} | {
        path.parent.name: path for path in folder.glob("*/__init__.py")
    }
    return {name: found[name] for name in sorted(found) if not name.startswith("_")}


def text_of(path: Path) -> Text:
    """Return the docstring of a module without importing it."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.STRING:
                return Text(token.start[0], str(ast.literal_eval(token.string)))
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING):
                break
    return Text(1, "")


def words_of(text: str) -> Counter[str]:
    """Count the words of a text in order, without common words and without endings."""
    words = [word for word in re.findall(r"[a-z]{4,}", text.lower()) if word not in _COMMON]
    return Counter(_ENDING.sub("", word) for word in words)


# Tools: each call is paid


class Tools:
    """The tools of the agent. A call is paid if its line is in the ledger."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def search(self, words: list[str]) -> list[str]:
        """Pay, and rank the documents by the words."""
        self._pay("search", " ".join(words))
        return self.ranking(words)

    def ranking(self, words: list[str]) -> list[str]:
        """Return the names of the documents with the most of the words, the best first."""
        ranks: dict[str, tuple[int, int]] = {}
        for name, path in documents_in(self._notes.folder).items():
            found = words_of(text_of(path).text)
            counts = [found[word] for word in words if word in found]
            ranks[name] = (-len(counts), -sum(counts))
        return [name for name in sorted(ranks, key=lambda name: (ranks[name], name)) if any(ranks[name])]

    def read(self, name: str) -> list[Passage]:
        """Pay, and read the matching paragraphs of a document."""
        self._pay("read", name)
        return self.passages(name)

    def passages(self, name: str) -> list[Passage]:
        """Return the paragraphs of a document that contain a word of the question."""
        line, text = text_of(documents_in(self._notes.folder)[name])
        found = []
        for paragraph in re.split(r"\n\s*\n", text):
            words = [word for word in words_of(paragraph) if word in self._notes.words]
            if words:
                at = line + text[: text.index(paragraph)].count("\n")
                shown = " ".join(paragraph.split())[:_MAX_PASSAGE]
                found.append(Passage(document=name, line=at, text=shown, words=words))
        return found

    def if_paid(self, unpaid: Callable[..., Any]) -> Callable[..., AlreadyDone[Any] | None]:
        """Return a `verify` function: if a call without a record was paid, it answers without paying again."""

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


# The agent


class Research(Agent[Notes]):
    """An agent that answers its goal, a question, from documents."""

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        tools = Tools(state)
        state.words = list(words_of(state.goal))
        names = await ctx.options(
            reasoning="documents with most words of the question come first",
            risky=True,
            verify=tools.if_paid(tools.ranking),
        ).tool("search", tools.search, state.words)
        chosen, left = names[: state.documents], names[state.documents :]
        await ctx.decide(
            f"read {', '.join(chosen)}", reasoning="they have most words of the question", alternatives=left[:5]
        )
        return [*map(read_step, chosen), PlanStep(key="write", title="write the report")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> Any:
        if step.key == "write":
            return await self.write(ctx, state)
        return await self.read(ctx, state, step.arguments["document"])

    async def read(self, ctx: Context, state: Notes, name: str) -> int:
        """Store the passages of a document as discoveries."""
        tools = Tools(state)
        found = await ctx.options(risky=True, verify=tools.if_paid(tools.passages)).tool("read", tools.read, name)
        for passage in found:
            await ctx.discover(passage.text, source=place(passage))
        state.passages += found
        return len(found)

    async def replan(self, ctx: Context, state: Notes) -> list[PlanStep] | None:
        """Read two more documents that the others refer to by name, once all planned ones are read."""
        still_open = [step for step in state.plan if step.status == "pending"]
        if state.followed or [step.key for step in still_open] != ["write"]:
            return None
        read = {passage.document for passage in state.passages}
        known = documents_in(state.folder)
        names = [name for passage in state.passages for name in re.findall(r"[a-z_]{4,}", passage.text)]
        named = Counter(name for name in names if name in known)
        state.followed = [name for name, _ in named.most_common() if name not in read][:2]
        if not state.followed:
            return None
        await ctx.decide(f"read {', '.join(state.followed)} too", reasoning="the passages refer to them")
        return [*map(read_step, state.followed), *still_open]

    async def write(self, ctx: Context, state: Notes) -> dict[str, Any]:
        """Decide what to cite, and save the report."""
        best = sorted(state.passages, key=lambda passage: (-len(passage.words), passage.document, passage.line))
        cited = best[: state.documents * 2]
        left = [place(passage) for passage in best[len(cited) :]]
        await ctx.decide(
            f"cite {len(cited)} of {len(best)} passages",
            reasoning="they have most words of the question",
            alternatives=left[:5],
        )
        saved = await ctx.artifacts.save("report.md", report(state, cited), media_type="text/markdown")
        return {"artifact": saved.hash, "cited": len(cited)}

    async def finish(self, ctx: Context, state: Notes) -> Report:
        read = [step for step in state.plan if step.key != "write"]
        return Report(documents=len(read), passages=len(state.passages), **state.results["write"])


research = app.agent(Research, retry=Retry(max_attempts=3, max_crashes=20))


def read_step(name: str) -> PlanStep:
    """Return the step that reads a document."""
    return PlanStep(key=f"read-{name}", title=f"read {name}", arguments={"document": name})


def place(passage: Passage) -> str:
    """Return the citation of a passage."""
    return f"{passage.document}:{passage.line}"


def report(state: Notes, cited: list[Passage]) -> str:
    """Return the answer in Markdown: citations for each word of the question, then the cited passages."""
    numbers = {place(passage): number for number, passage in enumerate(cited, 1)}
    lines = [f"# {state.goal}", ""]
    for word in state.words:
        citations = [f"[{numbers[place(passage)]}]" for passage in cited if word in passage.words]
        lines.append(f"- **{word}**: {' '.join(citations) or 'not found'}")
    lines += ["", "## Passages", ""]
    lines += [f"{numbers[place(passage)]}. {passage.text} ({place(passage)})" for passage in cited]
    return "\n".join([*lines, ""])


async def main() -> None:
    """Enqueue the question of the command line, and work until it is answered."""
    question = " ".join(sys.argv[1:]) or "How are threads and processes started, and how do they wait for one another?"
    async with app:
        handle = await research.enqueue(question)
        async with Worker(app) as worker:
            await worker.run(burst=True)
        found = await handle.result(timeout=60)
        sys.stdout.write(f"task {handle.id}\n{found.model_dump_json(indent=1)}\n")


if __name__ == "__main__":
    asyncio.run(main())
